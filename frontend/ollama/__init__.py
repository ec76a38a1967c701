"""Ollama's API as a thin translation: its requests become chats, prompts and embeddings, and their answers lines of JSON."""
