"""Names the places of a pool, and splits leases and load reports by place. Pure.

A *place* is where a request can be put: a worker, or a data-parallel rank of one, if its engine has several. Each rank has a KV
cache and a queue of its own, so routers keep an index, a load and a speed per place. A worker with one rank is a place under
its own id; rank 2 of worker `w` is the place `w~2`. No id contains `~`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

import msgspec

from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember

SEPARATOR = "~"


def place_name(worker: str, rank: int | None) -> str:
    """Return the name of a place. `rank` None: the worker has one rank."""
    return worker if rank is None else f"{worker}{SEPARATOR}{rank}"


@lru_cache(maxsize=4096)
def worker_of(place: str) -> str:
    return place.partition(SEPARATOR)[0]


@lru_cache(maxsize=4096)
def rank_of(place: str) -> int | None:
    """Return the rank that a place names; None if it is a whole worker, or no rank can be read."""
    rank = place.partition(SEPARATOR)[2]
    return int(rank) if rank.isdecimal() else None


def ranks_of(ranks: int) -> list[int | None]:
    """List the ranks of a worker as places name them: only None for a worker with one."""
    return list(range(ranks)) if ranks > 1 else [None]


def places_of(members: Mapping[str, WorkerMember]) -> dict[str, WorkerMember]:
    """Return the places of these workers, each with a lease as a worker of that size would have it."""
    places = {}
    for worker, member in members.items():
        if member.ranks < 2:
            places[worker] = member
            continue
        part = {"slots": _part(member.slots, member.ranks), "blocks": member.blocks // member.ranks, "ranks": 1}
        for rank in range(member.ranks):
            name = place_name(worker, rank)
            places[name] = msgspec.structs.replace(member, worker=name, **part)
    return places


def reports_of(report: LoadReport) -> list[LoadReport]:
    """Return the load reports of the places of a worker; the report itself for a worker with one rank.

    Suspects count in every place, because the ranks of an engine die together.
    """
    ranks = report.ranks
    if len(ranks) < 2:
        return [report]
    return [
        msgspec.structs.replace(
            report,
            worker=place_name(report.worker, rank),
            ranks=[],
            slots=_part(report.slots, len(ranks)),
            **msgspec.structs.asdict(load),
        )
        for rank, load in enumerate(ranks)
    ]


def _part(slots: int, ranks: int) -> int:
    return max(slots // ranks, 1) if slots else 0
