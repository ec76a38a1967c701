"""Chat templates of many model families, conversations, and what transformers makes of them. `expect.py` writes the latter."""
