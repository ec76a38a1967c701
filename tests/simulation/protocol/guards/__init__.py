"""The rules of the job protocol, each with a way to take it out of force.

`test_guards.py` shows that the search finds what breaks without it.  A rule whose absence nothing notices would be one
that no test holds.
"""

from __future__ import annotations

from tests.simulation.protocol.guards import crashes, judge, placement, verdicts, worker
from tests.simulation.protocol.guards.registry import GUARDS

__all__ = ["GUARDS", "crashes", "judge", "placement", "verdicts", "worker"]
