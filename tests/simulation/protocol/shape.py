"""The shape of a simulated deployment: how many processes, what clients wish, and what may happen to them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from headrace.broker.settings import Timing
from headrace.broker.worker.session import WorkerSession
from headrace.jetstream.subjects import Subjects
from headrace.router.session.window import SchedulingPort
from tests.simulation.protocol.engine import SimEngine
from tests.simulation.protocol.requests import Wish
from tests.simulation.protocol.router import random_scheduler
from tests.simulation.virtual.machine import Machine

SUBJECTS = Subjects("hr")
TIMING = Timing(lease_ttl_s=3.0, load_period_s=5.0, load_gap_s=0.5)
SLOW_CLIENT_S = 6.0
SPILL_BYTES = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A deployment. `wishes` makes the requests of one ingress process from its random source."""

    wishes: Callable[[Machine], list[Wish]]
    workers: int = 2
    ingresses: int = 1
    routers: int = 0
    slots: int = 3
    fleets: tuple[str, ...] = ("",)  # worker n belongs to the n-th, counted round; a later one costs more
    start_s: float = 0.0  # what the leases of workers say of their start
    shed: float = 0.0
    scheduler: Callable[[Machine, float], SchedulingPort] = random_scheduler
    poison_limit: int = 4  # crashes by one poison request
    all_poison_limit: int = 1000  # crashes by all of them together
    innocents_live: bool = False  # no innocent may end as poison
    unlucky: int = 0  # but for one that so many kills hit, each before it made progress; 0 = none at all
    unsuspected: bool = False  # nothing that happens may look like the death of a worker
    refused_unstarted: bool = False  # no request is refused that has given tokens
    max_rows: int = 4096
    parked_tokens: int = 4096
    no_worker_wait_s: float = 0.0  # 0: a client that finds no worker tries again


@dataclass(eq=False, slots=True)
class Worker:
    machine: Machine
    session: WorkerSession
    engine: SimEngine
