"""Publishes an engine's cache events as messages in the KV stream.

`translator` gives blocks their chain values and `outbox` packs changes into messages, both without I/O; `feed` reads the
engine's events and repairs gaps, `publisher` stores the messages.
"""
