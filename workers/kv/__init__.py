"""From an engine's cache events to messages in the KV stream.

`translate` gives blocks their names, `outbox` makes messages of changes, both without I/O; `feed` reads the engine and repairs
what is lost on the way from it, `publisher` stores the messages.
"""
