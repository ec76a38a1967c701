"""`headrace bench serve`: load on a running OpenAI-compatible server, and what it answers."""
