"""Calls the elections of a cluster whose leaders died, before its own timers do."""

ELECTOR_NAME = "headrace elector"  # of its connections, as servers report them
