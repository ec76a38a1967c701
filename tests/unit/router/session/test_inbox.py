"""Leases, reports and events of workers reach the scheduler by place, and it is known whose cache is only guessed."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
import structlog
from prometheus_client import REGISTRY

from headrace.broker.codec import encode
from headrace.broker.messages.events import JobEvent, JobEvents, LoadReport, RankLoad
from headrace.broker.messages.members import WorkerMember
from headrace.jetstream.ports import Message
from headrace.router.session import inbox
from headrace.router.session.inbox import Roster, RouterInbox, worker_info
from headrace.router.session.window import PoolIndex
from tests.support.router.router_parts import request_window, router_deps
from tests.support.router.scheduler import RandomScheduler

MEMBER = WorkerMember(
    worker="w1", pool="p", model="m", slots=4, blocks=100, block_size=16, labels=["a"], kv_events=True, epoch=7
)


def test_the_scheduler_learns_from_a_lease_how_long_the_worker_took_to_start() -> None:
    told = worker_info(msgspec.structs.replace(MEMBER, start_s=6.5), kv_events=True)
    assert (told.worker, told.epoch, told.start_s) == ("w1", 7, 6.5)


@dataclass
class FakeMembers:
    live: dict[str, WorkerMember] = field(default_factory=dict)

    def workers(self, pool: str) -> dict[str, WorkerMember]:
        return self.live


@dataclass
class FakeFeed:
    events: dict[str, tuple[int, int]] = field(default_factory=dict)
    distrusted: list[str] = field(default_factory=list)

    def known(self, worker: str) -> tuple[int, int] | None:
        return self.events.get(worker)

    def distrust(self, worker: str) -> None:
        self.events.pop(worker, None)
        self.distrusted.append(worker)


@dataclass
class FakeView:
    told: list[tuple[str, bool, int]] = field(default_factory=list)

    def add_worker(self, worker: str, *, approximate: bool = False, capacity_blocks: int = 0) -> None:
        self.told.append((worker, approximate, capacity_blocks))


class Made:
    def __init__(self, *members: WorkerMember, block_size: int = 0) -> None:
        self.members = FakeMembers({member.worker: member for member in members})
        self.scheduler = RandomScheduler(random.Random(1))
        self.view = FakeView()
        self.feed = FakeFeed()
        index = PoolIndex(self.view, self.feed, None, [])  # type: ignore[arg-type]
        self.roster = Roster(router_deps(members=self.members, block_size=block_size), self.scheduler, index)
        self.roster.refresh(0.0)

    def prefill(self, times: int, *, from_s: float, to_s: float, uncached: int = 500) -> None:
        for n in range(times):
            now_s = from_s + (to_s - from_s) * n / max(1, times - 1)
            self.prefill_one(f"r{n}", now_s, uncached=uncached)

    def prefill_one(self, request_id: str, now_s: float, *, uncached: int = 500) -> None:
        self.roster.on_event(JobEvent("prefilled", request_id, 1, "w1", 500, uncached), now_s)


def approximate() -> float | None:
    return REGISTRY.get_sample_value("headrace_router_approximate_workers", {"pool": "p"})


def test_workers_that_come_change_and_go_are_told_to_the_scheduler() -> None:
    made = Made(MEMBER)
    info = made.scheduler.workers["w1"]
    assert (info.slots, info.blocks, info.block_size, info.labels, info.epoch) == (4, 100, 16, frozenset({"a"}), 7)
    assert made.view.told == [("w1", False, 100)]
    assert not made.roster.refresh(1.0)
    made.members.live["w1"] = msgspec.structs.replace(MEMBER, draining=True)
    assert made.roster.refresh(2.0)
    assert made.scheduler.workers["w1"].draining
    del made.members.live["w1"]
    assert made.roster.refresh(3.0)
    assert made.scheduler.workers == {}


def test_blocks_of_an_engine_that_are_longer_than_the_pools_are_counted_by_those() -> None:
    made = Made(MEMBER, block_size=4)
    info = made.scheduler.workers["w1"]
    assert (info.blocks, info.block_size, info.pool_blocks) == (400, 4, 4)
    assert made.view.told == [("w1", False, 400)]


def test_each_rank_of_a_worker_is_a_place_and_the_worker_is_counted_once() -> None:
    made = Made(msgspec.structs.replace(MEMBER, ranks=2))
    assert {place: (info.slots, info.blocks) for place, info in made.scheduler.workers.items()} == {
        "w1~0": (2, 50),
        "w1~1": (2, 50),
    }
    assert made.view.told == [("w1~0", False, 50), ("w1~1", False, 50)]
    assert REGISTRY.get_sample_value("headrace_router_workers", {"pool": "p"}) == 1
    assert REGISTRY.get_sample_value("headrace_router_places", {"pool": "p"}) == 2
    made.members.live.clear()
    made.roster.refresh(1.0)
    assert made.scheduler.workers == {}


def test_a_worker_whose_engine_has_no_cache_events_is_approximate_and_that_is_said() -> None:
    with structlog.testing.capture_logs() as logs:
        made = Made(msgspec.structs.replace(MEMBER, kv_events=False))
    assert made.view.told == [("w1", True, 100)]
    assert made.scheduler.workers["w1"].kv_events is False
    assert approximate() == 1
    assert [entry["event"] for entry in logs] == ["worker.approximate"]


def test_a_worker_that_promises_events_and_sends_none_is_found_out() -> None:
    made = Made(MEMBER)
    assert approximate() == 0
    made.feed.events["w1"] = (1, 5)  # it once sent some
    with structlog.testing.capture_logs() as logs:
        made.prefill(20, from_s=0.0, to_s=10.0)
    assert made.view.told[-1] == ("w1", True, 100)
    assert made.feed.distrusted == ["w1"]
    assert made.scheduler.workers["w1"].kv_events is False
    assert approximate() == 1
    assert [entry["event"] for entry in logs] == ["worker.approximate"]


def test_a_worker_that_sends_events_is_left_alone() -> None:
    made = Made(MEMBER)
    for n in range(40):
        made.feed.events["w1"] = (1, n)
        made.prefill(1, from_s=float(n), to_s=float(n))
    assert made.view.told == [("w1", False, 100)]


def test_prefills_too_short_for_a_block_or_too_close_together_show_nothing() -> None:
    made = Made(MEMBER)
    made.prefill(50, from_s=0.0, to_s=60.0, uncached=31)
    made.prefill(50, from_s=0.0, to_s=1.0)
    assert made.view.told == [("w1", False, 100)]


def test_prompts_that_other_workers_computed_say_nothing_of_a_workers_cache_events() -> None:
    made = Made(MEMBER)
    for n in range(20):
        made.roster.on_event(JobEvent("placed", f"r{n}", 1, "w1", 500, 500, by="r", prefill="*"), float(n))
        made.roster.on_event(JobEvent("started", f"r{n}", 1, "w1", 500), float(n))
        made.prefill_one(f"r{n}", float(n))
    assert made.view.told == [("w1", False, 100)]
    for n in range(20):
        made.roster.on_event(JobEvent("placed", f"s{n}", 1, "w1", 500, 500, by="r"), 30.0 + n)
        made.prefill_one(f"s{n}", 30.0 + n)
    assert made.view.told[-1] == ("w1", True, 100)


def test_requests_computed_elsewhere_are_remembered_until_they_end_and_no_more_than_so_many(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(inbox, "REMOTE_LIMIT", 3)
    made = Made(MEMBER)
    for n in range(10):
        made.roster.on_event(JobEvent("placed", f"r{n}", 1, "w1", 500, 500, by="r", prefill="*"), 0.0)
    assert len(made.roster._remote) == 3
    made.roster.on_event(JobEvent("settled", "r9", 1, "w1"), 1.0)
    made.roster.on_event(JobEvent("moved", "r8", 1, "w1"), 1.0)
    assert list(made.roster._remote) == ["r7"]


def test_role_and_hand_over_reach_the_scheduler_and_prefill_workers_are_counted_apart() -> None:
    made = Made(MEMBER, msgspec.structs.replace(MEMBER, worker="w2", role="prefill", handover="sim/params"))
    info = made.scheduler.workers["w2"]
    assert (info.role, info.handover, info.serves) == ("prefill", "sim/params", False)

    def counted() -> tuple[float | None, ...]:
        names = ("headrace_router_workers", "headrace_router_prefill_workers")
        return tuple(REGISTRY.get_sample_value(name, {"pool": "p"}) for name in names)

    assert counted() == (1, 1)
    made.members.live["w2"] = msgspec.structs.replace(MEMBER, worker="w2", role="decode", handover="sim/params")
    with structlog.testing.capture_logs() as logs:
        assert made.roster.refresh(1.0)
    assert made.scheduler.workers["w2"].takes_handovers
    assert counted() == (2, 0)
    assert [entry["event"] for entry in logs] == ["worker.role"]


def test_the_first_event_makes_it_exact_again() -> None:
    made = Made(msgspec.structs.replace(MEMBER, kv_events=False))
    made.roster.trust_senders(1.0)
    assert approximate() == 1
    made.feed.events["w1"] = (2, 0)
    made.roster.trust_senders(2.0)
    assert made.scheduler.workers["w1"].kv_events is True
    assert approximate() == 0


def test_an_encode_worker_is_none_that_anything_is_placed_on() -> None:
    made = Made(MEMBER, msgspec.structs.replace(MEMBER, worker="e1", role="encode", kv_events=False))
    assert set(made.scheduler.workers) == {"w1"}
    assert [name for name, _, _ in made.view.told] == ["w1"]
    assert REGISTRY.get_sample_value("headrace_router_prefill_workers", {"pool": "p"}) == 0


class Heard(RandomScheduler):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.reports: list[tuple[str, int]] = []
        self.events: list[tuple[str, str]] = []

    def on_report(self, report: LoadReport, now_s: float) -> None:
        self.reports.append((report.worker, report.running))

    def on_event(self, event: JobEvent, now_s: float) -> None:
        self.events.append((event.kind, event.worker))


class Deaf:
    def on_event(self, event: JobEvent, now_s: float) -> None: ...


def inbox_of(scheduler: Heard) -> RouterInbox:
    deaf: Any = Deaf()
    return RouterInbox(router_deps(), request_window(scheduler), deaf, deaf)


async def test_a_load_report_is_one_per_rank() -> None:
    heard = Heard()
    report = LoadReport(
        worker="w", epoch=1, n=1, at=0.0, slots=8, running=3, waiting=0, ranks=[RankLoad(running=1), RankLoad(running=2)]
    )
    inbox_of(heard).on_report(Message("hr.load.p.w", encode(report)))
    assert heard.reports == [("w~0", 1), ("w~1", 2)]


async def test_a_job_event_counts_for_the_rank_that_it_names() -> None:
    heard = Heard()
    events = [
        JobEvent("started", "a", 1, "w", rank=1),
        JobEvent("settled", "b", 1, "v"),
        JobEvent("moved", "c", 1, "w", rank=0),
    ]
    inbox_of(heard).on_events(Message("hr.ev.p", encode(JobEvents(events=events))))
    assert heard.events == [("started", "w~1"), ("settled", "v"), ("moved", "w~0")]
