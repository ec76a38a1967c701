"""A request that finds nothing waiting is placed as it would be with a row in the window, and everything is as after that."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import pytest

from headrace.router.placement.settings import AdmissionSettings
from headrace.router.placement.types import Placement, Waiting
from tests.support.router.placement_pool import BLOCK, Pool, chain

CLASSES = ("std", "std", "std", "high", "low", "re")


class Twins:
    """The same pool twice: one takes a request directly where it can, the other always offers it and decides."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        settings: dict[str, Any] = {
            "binding": rng.choice(["late", "late", "early"]),
            "thrift": rng.choice([0.0, 0.25]),
            "max_wait_s": rng.choice([0.5, 60.0]),
            "limits": AdmissionSettings(hopeless_factor=rng.choice([0.5, 1.0])),
        }
        self.workers = "abcd"[: rng.randint(1, 4)]
        self.lone, self.usual = Pool(self.workers, **settings), Pool(self.workers, **settings)
        self.direct = self.left = 0
        routers = [f"r{n}" for n in range(1, rng.choice([1, 1, 2, 3]) + 1)]
        self.both(lambda pool: pool.scheduler.set_routers(routers))
        self.running: list[tuple[str, str]] = []
        self.families = [chain(n, 30) for n in range(1, 4)]

    def both(self, act: Any) -> tuple[Any, Any]:
        return act(self.lone), act(self.usual)

    def request(self, number: int) -> Waiting:
        rng, now = self.rng, self.lone.now
        shared = rng.choice(self.families)[: rng.randint(0, 30)]
        blocks = [*shared, *chain(1000 + number, rng.randint(0, 5))]
        return Waiting(
            id=f"q{number}",
            name=f"name{number % 5}",
            chain=blocks,
            block_size=BLOCK if blocks else 0,
            tokens=max(1, len(blocks) * BLOCK + rng.randint(-3, 200)),
            max_tokens=rng.choice([0, 16, 4000]),
            request_class=rng.choice(CLASSES),
            tenant=rng.choice(["_", "one", "two"]),
            priority=rng.choice([0, 0, 1]),
            arrived_s=now - rng.choice([0.0, 0.01, 1.0, 40.0]),
            entered_s=now,
            deadline_s=now + rng.choice([600.0, 600.0, 1.0, -1.0, float("inf")]),
            session=rng.choice(["", "", "", "s"]),
            worker=rng.choice(["", "", "", "", self.workers[0]]),
            prefer={"label": 1.0} if rng.random() < 0.05 else {},
        )

    def come(self, number: int) -> None:
        request = self.request(number)
        self.decide()  # and forget what is old: an offer looks at loads before the decision that follows does that
        shed = self.usual.scheduler.offer(request, self.usual.now)
        usual = [shed] if shed is not None else self.usual.decide()
        placement = self.lone.scheduler.place_now(request, self.lone.now)
        if placement is not None:
            self.direct += 1
            assert not self.lone.scheduler.waiting
            lone: list[Any] = [placement]
        else:
            self.left += 1
            shed = self.lone.scheduler.offer(request, self.lone.now)
            lone = [shed] if shed is not None else self.lone.decide()
        assert lone == usual, "the decisions differ"
        self.note(lone)

    def drain(self) -> None:
        lone, usual = self.both(lambda pool: [request.id for request in pool.scheduler.drain()])
        assert lone == usual

    def decide(self) -> None:
        lone, usual = self.both(lambda pool: pool.decide())
        assert lone == usual
        self.note(lone)

    def note(self, decisions: list[Any]) -> None:
        self.running += [(one.request.id, one.worker) for one in decisions if isinstance(one, Placement)]

    def happen(self) -> None:
        rng = self.rng
        what = rng.choice(["time", "time", "report", "report", "start", "end", "end", "decide", "elsewhere"])
        if what == "time":
            seconds = rng.choice([0.0, 0.001, 0.05, 1.0, 7.0])
            self.both(lambda pool: pool.pass_time(seconds))
        elif what == "report":
            worker, queued = rng.choice(self.workers), rng.choice([0, 0, 3000, 20_000])
            figures = {"running": rng.choice([0, 0, 1, 5, 8]), "queued_prefill_tokens": queued}
            figures |= {"blocks_total": 200, "blocks_used": rng.choice([0, 150])}
            self.both(lambda pool: pool.report(worker, **figures))
        elif what == "elsewhere":
            worker = rng.choice(self.workers)
            self.both(lambda pool: pool.event("placed", "theirs", worker, tokens=900, uncached=900, by="r2"))
        elif what == "decide":
            self.decide()
        elif self.running:
            request_id, worker = rng.choice(self.running)
            kind = "started" if what == "start" else "settled"
            self.both(lambda pool: pool.event(kind, request_id, worker, tokens=rng_tokens(request_id)))
            if kind == "settled":
                self.running.remove((request_id, worker))

    def compare(self, number: int) -> None:
        """What operators are told, and what later decisions look at."""
        for wanted in (f"q{number}", f"name{number % 5}"):
            lone, usual = self.both(lambda pool, wanted=wanted: pool.scheduler.explain(wanted, pool.now))
            assert (lone and msgspec.to_builtins(lone)) == (usual and msgspec.to_builtins(usual))
        mine, theirs = self.both(lambda pool: pool.scheduler.window.queue.interactive)
        assert mine._balance == theirs._balance
        assert mine.accounts.floor == theirs.accounts.floor
        assert figures_of(mine.accounts._tenants) == figures_of(theirs.accounts._tenants)
        assert list(mine.accounts._idle) == list(theirs.accounts._idle)
        assert list(mine.accounts._open) == list(theirs.accounts._open)


def rng_tokens(request_id: str) -> int:
    return len(request_id) * 37


def figures_of(tenants: Any) -> dict[str, tuple[float, ...]]:
    return {name: (one.counter, one.lifts, one.gap, one.running, one.left_at) for name, one in tenants.items()}


@pytest.mark.parametrize("seed", range(8))
def test_it_is_placed_as_by_the_long_way_and_leaves_the_same_behind(seed: int) -> None:
    direct = left = 0
    for part in range(6):
        twins = Twins(6 * seed + part)
        for number in range(100):
            twins.come(number)
            twins.compare(number)
            for _ in range(twins.rng.randint(0, 6)):
                twins.happen()
            if twins.rng.random() < 0.3:
                twins.drain()
        direct += twins.direct
        left += twins.left
    assert direct > 20, "the short way was hardly tried"
    assert left > 20


def test_it_is_offered_as_ever_while_another_one_waits() -> None:
    pool = Pool("a")
    pool.report("a", running=8)
    pool.offer("first")
    pool.report("a", running=0)
    assert pool.scheduler.place_now(Waiting(id="second", tokens=10, arrived_s=pool.now), pool.now) is None


def test_what_may_crash_a_worker_is_offered_as_ever() -> None:
    pool = Pool("a")
    assert pool.scheduler.place_now(Waiting(id="suspect", tokens=10, arrived_s=pool.now, suspect=True), pool.now) is None
    assert pool.scheduler.place_now(Waiting(id="usual", tokens=10, arrived_s=pool.now), pool.now) is not None
