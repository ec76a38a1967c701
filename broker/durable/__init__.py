"""Durable work: stored jobs, the carriers that run them, their one result, and their durable streams.

A stored job is owned by its message, a judge is only lent to it, and it has one end, decided by one compare-and-set
(`docs/reliability.md`, durable work).
"""
