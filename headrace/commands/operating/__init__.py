"""Commands to running workers and models, sent over NATS."""
