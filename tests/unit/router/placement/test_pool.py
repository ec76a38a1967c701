"""The workers of a large pool are described by what has changed, and the numbers are those of a full description."""

from __future__ import annotations

import random
from typing import Any

import pytest

from headrace.broker.messages.events import JobEvent, LoadReport
from headrace.router.index.view import Caches, create_index
from headrace.router.placement import decision_log, load, scheduler, window
from headrace.router.placement.cost import make_worker_view
from headrace.router.placement.scheduler import Scheduler
from headrace.router.placement.settings import SchedulerSettings
from headrace.router.placement.types import Placement, Waiting, WorkerInfo
from headrace.router.placement.worker_view import WorkerView

COLUMNS = [name for name in WorkerView.__annotations__ if name.startswith("all_")]


class History:
    """One scheduler to which anything may happen, the same for the same seed."""

    def __init__(self, seed: int, **settings: Any) -> None:
        self.rng = random.Random(seed)
        self.settings = SchedulerSettings(entry_expiry_s=1.0, **settings)
        self.view = Caches(create_index(), predicted_ttl_s=0.5)
        self.scheduler = Scheduler(self.settings, self.view, name="r")
        self.now_s = 100.0
        self.reports = 0
        self.offered = 0
        self.placed: list[Placement] = []
        self.told: list[Any] = []
        for n in range(4):
            self.join(f"w{n}")

    def join(self, name: str) -> None:
        rng = self.rng
        self.view.add_worker(name)
        info = WorkerInfo(
            worker=name,
            slots=rng.choice([2, 4]),
            blocks=rng.choice([0, 60]),
            block_size=16,
            step_tokens=rng.choice([0, 512]),
            draining=rng.random() < 0.1,
        )
        self.scheduler.put_worker(info, self.now_s)

    def step(self) -> None:
        self.now_s += self.rng.choice([0.0, 0.001, 0.02, 0.3])
        name = f"w{self.rng.randrange(6)}"
        act = self.rng.choice(
            [self.report, self.report, self.offer, self.offer, self.offer, self.event, self.event, self.store]
        )
        if self.rng.random() < 0.05:
            act = self.rng.choice([self.join, self.leave, self.unplace, self.elsewhere])
        act(name)
        made = self.scheduler.decide(self.now_s)
        self.placed += [one for one in made if isinstance(one, Placement)]
        self.told.append(
            ([(one.request.id, getattr(one, "worker", "")) for one in made], self.scheduler.next_wake_s(self.now_s))
        )

    def leave(self, name: str) -> None:
        self.scheduler.remove_worker(name, self.now_s)
        self.view.drop_worker(name)

    def report(self, name: str) -> None:
        rng = self.rng
        self.reports += 1
        used = rng.randrange(60)
        report = LoadReport(
            worker=name, epoch=1, n=self.reports, at=self.now_s, slots=rng.choice([4, 4, 4, 0]), running=rng.randrange(5),
            waiting=0, queued_prefill_tokens=rng.choice([0, 0, 100, 4000]), blocks_total=60, blocks_used=used,
            yielding=rng.randrange(2), yielding_blocks=rng.randrange(used + 1), suspects=rng.choice([0, 0, 0, 1]), limit=2,
            step_s=rng.choice([0.01, 0.02]), step_prefill_tokens=rng.choice([0, 256]), step_decodes=rng.randrange(5),
        )  # fmt: skip
        self.scheduler.on_report(report, self.now_s)

    def offer(self, _name: str) -> None:
        rng = self.rng
        self.offered += 1
        blocks = [7, *range(100 * rng.randrange(5), 100 * rng.randrange(5) + rng.randrange(1, 9)), 10_000 + self.offered]
        request = Waiting(
            id=f"r{self.offered}",
            tokens=16 * len(blocks) + 3,
            chain=blocks,
            block_size=16,
            request_class=rng.choice(["std", "std", "std", "batch"]),
            tenant=rng.choice("ab"),
            arrived_s=self.now_s,
            suspect=rng.random() < 0.05,
        )
        self.scheduler.offer(request, self.now_s)
        if request.suspect:
            self.scheduler.assess(request.id, limit=rng.choice([0, 1, 4]), crashes=1)

    def event(self, _name: str) -> None:
        if self.placed:
            one = self.rng.choice(self.placed[-8:])
            kind = self.rng.choice(["started", "prefilled", "settled"])
            self.scheduler.on_event(JobEvent(kind, one.request.id, 1, one.worker, one.request.tokens, one.uncached), self.now_s)

    def store(self, name: str) -> None:
        if self.scheduler.pool.loads.get(name) is not None:
            start = 100 * self.rng.randrange(5)
            blocks = [7, *range(start, start + 8)]
            what = {"stored": {"device": blocks}, "removed": {}}
            if self.rng.random() < 0.3:
                what = {"stored": {}, "removed": {"device": blocks[self.rng.randrange(8) :]}}
            self.view.apply(name, now_s=self.now_s, **what)  # type: ignore[arg-type]

    def unplace(self, _name: str) -> None:
        if self.placed:
            self.scheduler.unplace(self.placed.pop(), self.now_s)

    def elsewhere(self, name: str) -> None:
        event = JobEvent("placed", f"o{self.rng.randrange(100)}", 1, name, 64, 32, by="other")
        self.scheduler.on_event(event, self.now_s)


@pytest.mark.parametrize("seed", range(12))
def test_what_is_kept_of_workers_is_what_a_full_description_says(seed: int) -> None:
    history = History(seed, binding="early" if seed % 4 == 3 else "late", balance=0.0 if seed % 5 == 4 else 1.5)
    many, loads = history.scheduler.pool.many, history.scheduler.pool.loads
    busy = 0
    for turn in range(300):
        history.step()
        if turn % 3 or not len(loads):
            continue
        for alone in (None, False, True):
            kept = many.view(history.now_s, batch_alone=alone)
            full = make_worker_view(loads, history.settings, many._recent, history.now_s, batch_alone=alone)
            for name in COLUMNS:
                assert getattr(kept, name) == getattr(full, name), (turn, name)
            assert many.room(history.now_s, batch_alone=alone).tolist() == full.all_room
            busy += not all(full.all_room)
    assert busy > 50
    assert len(history.placed) > 20


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("routers", [1, 2])
def test_a_large_pool_decides_as_a_small_one(seed: int, routers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever is bounded for the sake of many workers changes no choice."""
    plain, large = History(seed), History(seed)
    for one in (plain, large):
        one.scheduler.set_routers([f"r{n}" for n in range(1, routers)])
    for _ in range(300):
        plain.step()
        with monkeypatch.context() as patch:
            patch.setattr(load, "MANY", 1)
            patch.setattr(window, "PAIRS", 0)
            patch.setattr(window, "LEAST", 1)
            large.step()
        assert large.told[-1] == plain.told[-1]
    assert len(plain.placed) > 20


def test_a_call_places_a_part_of_very_much_and_asks_to_be_called_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler, "_PLACED", 0)
    monkeypatch.setattr(scheduler, "_LEAST_PLACED", 2)
    history = History(0, binding="early")
    for _ in range(5):
        history.offer("")
    sizes = []
    for _ in range(3):
        sizes.append(len(history.scheduler.decide(history.now_s)))
        wake_s = history.scheduler.next_wake_s(history.now_s)
        assert (wake_s is None) == (sum(sizes) == 5)
        assert wake_s is None or wake_s - history.now_s < 0.0011
    assert sizes == [2, 2, 1]


def test_of_many_workers_the_cheapest_are_remembered_to_explain_a_decision() -> None:
    view = Caches(create_index())
    pool = Scheduler(SchedulerSettings(), view, name="r")
    for n in range(100):
        view.add_worker(f"w{n}")
        pool.put_worker(WorkerInfo(worker=f"w{n}", slots=4, block_size=16, draining=n < 10), 0.0)
        waits = LoadReport(worker=f"w{n}", epoch=1, n=1, at=0.0, slots=4, running=0, waiting=0, queued_prefill_tokens=n)
        pool.on_report(waits, 0.0)
    pool.offer(Waiting(id="r", tokens=160, block_size=16), 0.0)
    (placed,) = pool.decide(0.0)
    assert isinstance(placed, Placement)
    assert placed.worker == "w10"
    explained = pool.explain("r", 0.0)
    assert explained is not None
    assert [one.worker for one in explained.candidates] == [f"w{n}" for n in range(10, 10 + decision_log.MOST_WORKERS)]
    assert [one.pending for one in explained.candidates] == list(range(10, 10 + decision_log.MOST_WORKERS))
    assert all(one.room and not one.why_not for one in explained.candidates)
