"""Decides which sleeping worker to wake for waiting requests that no worker in service may take."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from itertools import islice
from typing import Protocol

from headrace.broker.messages import WorkerMember

LOOKED_AT = 256  # waiting requests per look; those behind them wait for the next one


class Wants(Protocol):
    """The demands of a waiting request on its worker (`headrace.router.session.held_request.RequestHead`)."""

    @property
    def adapter(self) -> str: ...
    @property
    def worker(self) -> str: ...
    @property
    def require(self) -> list[str]: ...


def worker_to_wake(
    waiting: Iterable[Wants],
    members: Collection[WorkerMember],
    *,
    asked: Collection[str] = (),
    resting: Collection[str] = (),
) -> str | None:
    """Return the id of the worker to wake; None if none has to be.

    A request that a worker in service may take, or one that is waking or `asked` to, wakes no other.  Among the sleeping ones
    the lightest sleep comes first, then the name, so that all routers of a pool choose the same one.  `resting` are not to be
    woken now.
    """
    serving = [member for member in members if member.serves]
    up = [member for member in serving if member.waking or not member.draining or member.worker in asked]
    asleep = [member for member in serving if member.sleeping and member not in up and member.worker not in resting]
    if not asleep:
        return None
    for wants in islice(waiting, LOOKED_AT):
        if any(_may_take(wants, member) for member in up):
            continue
        able = [member for member in asleep if _may_take(wants, member)]
        if able:
            return min(able, key=lambda member: (member.sleeping, member.worker)).worker
    return None


def _may_take(wants: Wants, member: WorkerMember) -> bool:
    if wants.worker and wants.worker != member.worker:
        return False
    if wants.adapter and wants.adapter not in member.adapters:
        return False
    return not set(wants.require) - set(member.labels)
