"""Leaves a server of a cluster that no longer reaches the others, or that stands still."""
