"""The planner: how many workers of each role a pool needs soon, and what to do about it."""
