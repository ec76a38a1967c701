"""Queues of waiting requests for the tests of fairness."""

from __future__ import annotations

import itertools

from headrace.router.placement.fair_queue import FairQueue
from headrace.router.placement.settings import FairClass, FairnessSettings
from headrace.router.placement.types import Waiting

_numbers = itertools.count()


def waiting(tenant: str = "a", *, tokens: int = 1000, request_class: str = "std", name: str = "", **options) -> Waiting:
    return Waiting(
        id=name or f"{tenant}-{next(_numbers)}",
        tokens=tokens,
        request_class=request_class,
        tenant=tenant,
        max_tokens=1,
        **options,
    )


CLASSES = (
    FairClass(name="re", rank=0, always_first=True),
    FairClass(name="hi", rank=1, ageing_s=10.0),
    FairClass(name="std", rank=2, ageing_s=30.0),
    FairClass(name="batch", rank=3, ageing_s=300.0),
)


def queue(**options) -> FairQueue:
    return FairQueue(FairnessSettings(**{"classes": CLASSES, "slack_tokens": 2000.0, **options}))


def first(fair: FairQueue, now_s: float = 0.0, limit: int = 64) -> list[str]:
    return [request.id for request in fair.heads(limit, now_s)]
