"""Hands what a vision or sound encoder makes of a media item from one vLLM to another."""
