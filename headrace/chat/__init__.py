"""Chats with a running deployment in the terminal, over its HTTP interface."""
