"""Costs of placing a request on each worker, one by one and as arrays."""
