"""Text to tokens and back, for clients that want to count or look."""
