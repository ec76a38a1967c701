"""Benchmarks of real engines and of NIXL."""
