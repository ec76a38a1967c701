"""Planners against each other on the same simulated engines, in virtual time."""
