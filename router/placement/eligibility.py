"""Eligibility of workers for a request: named worker, required labels, adapter, session."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from headrace.broker.places import worker_of
from headrace.router.placement.load import LoadTable, WorkerLoad
from headrace.router.placement.types import Waiting, WorkerInfo


def why_not(request: Waiting, load: WorkerLoad) -> str:
    """Return the reason for which this worker may not take the request; empty if it may."""
    info = load.info
    return "draining" if info.draining else lacks(request, info)


def lacks(request: Waiting, info: WorkerInfo) -> str:
    """Return what this worker lacks for the request, whether it serves now or not; empty if nothing."""
    if request.worker and request.worker not in (info.worker, worker_of(info.worker)):
        return "another worker is named"
    if missing := request.require - info.labels:
        return f"no label {', '.join(sorted(missing))}"
    if request.adapter and request.adapter not in info.adapters:
        return f"no adapter {request.adapter}"
    if info.context and request.longest > info.context:
        return f"its context has {info.context} tokens"
    return ""


def comes(request: Waiting, loads: LoadTable) -> bool:
    """Return whether a worker that is about to serve again may take the request then."""
    return any(load.info.waking and not lacks(request, load.info) for load in loads)


def eligible_columns(request: Waiting, loads: LoadTable) -> Sequence[int]:
    """List the columns of the workers that may take the request."""
    anywhere = not request.worker and not request.require and not request.adapter
    if anywhere and (not loads.least_context or request.longest <= loads.least_context):
        return loads.serving
    return [load.column for load in loads if not why_not(request, load)]


def session_column(session: str, columns: Sequence[int], loads: LoadTable) -> int:
    """Return the column of the worker that a session belongs to, given with its tenant: no other tenant's is the same.

    By rendezvous hashing (Thaler and Ravishankar 1998) all routers agree without a message, a restart forgets nothing, and a
    worker that comes or goes moves only the sessions that it gains or had.
    """
    names = loads.ordered
    return max(columns, key=lambda column: xxhash.xxh3_64_intdigest(f"{session}\0{names[column].info.worker}".encode()))
