"""Encryption of nats-server's store: its key, what is stored under which one, and stores that were made without."""
