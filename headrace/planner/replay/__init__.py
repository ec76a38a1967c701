"""Replays a deployment's past in virtual time: what another planner, or none, would have made of it."""
