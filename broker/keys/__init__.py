"""API keys: what they are, what they may do, and where they are kept. Only their hashes are stored."""
