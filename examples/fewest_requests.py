"""A routing policy that sends each request to the worker with the fewest running ones.

docs/add-a-routing-policy.md walks through it. With this folder on PYTHONPATH:

    headrace up --engine sim --workers 2 --policy fewest_requests:fewest_requests
"""

from __future__ import annotations

import random

from headrace.router.placement.policies import Policy, SimplePolicy
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.worker_view import WorkerView


def fewest_requests(settings: SchedulerSettings, rng: random.Random) -> Policy:
    """Return the policy of one pool. Chance, if any, comes from `rng`, so that a replay with the same seed decides the same."""
    return SimplePolicy(settings, _choose)


def _choose(columns: list[int], workers: WorkerView) -> int:
    """Return the column of the worker, among those with room that may take the request."""
    running = workers.all_running
    return min(columns, key=lambda column: running[column])
