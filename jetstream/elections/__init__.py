"""Calls the elections of a cluster whose leaders died, before its own timers do."""
