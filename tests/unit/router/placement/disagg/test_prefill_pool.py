"""When prefill workers will be through: predicted, corrected, and never stuck."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.messages import LoadReport
from headrace.router.placement.calibration import SpeedEstimate
from headrace.router.placement.disagg.prefill_pool import IN_TRANSIT_S, PrefillPool
from headrace.router.placement.types import WorkerInfo

SPEED = SpeedEstimate(0.0, 1000.0, 0.0)


def made(workers: str = "p", *, grace_s: float = 5.0, **info: Any) -> PrefillPool:
    pool = PrefillPool(grace_s)
    for worker in workers:
        pool.put(WorkerInfo(worker=worker, slots=8, role="prefill", handover="x", **info), SPEED)
    return pool


def place(pool: PrefillPool, job: str, tokens: float, now_s: float = 0.0, **more: Any) -> None:
    pool.place(job, **{"decode": "d", "handover": "x", "tokens": tokens, "blocks": 2, "now_s": now_s, **more})


def waits(pool: PrefillPool, now_s: float) -> dict[str, float]:
    return {one.info.worker: round(one.wait_s(now_s), 6) for one in pool}


def report(worker: str = "p", **fields: Any) -> LoadReport:
    values: dict[str, Any] = {"slots": 8, "running": 0, "waiting": 0, **fields}
    return LoadReport(worker=worker, epoch=1, n=1, at=0.0, **values)


def test_jobs_for_any_go_to_whoever_is_through_first() -> None:
    pool = made("pq")
    for n, tokens in enumerate((3000, 1000, 1000)):
        place(pool, f"j{n}", tokens)
    assert waits(pool, 0.0) == {"p": 3.0, "q": 2.0}
    assert waits(pool, 2.5) == {"p": 0.5, "q": 0.0}
    assert pool.queued_tokens(0.0) == 5000
    assert pool.queued_tokens(1.5) == pytest.approx(2000)


def test_a_job_for_one_waits_for_that_one() -> None:
    pool = made("pq")
    place(pool, "a", 1000)
    place(pool, "b", 1000, worker="p")
    assert waits(pool, 0.0) == {"p": 2.0, "q": 0.0}


def test_jobs_for_others_that_hand_over_differently_keep_nobody_busy() -> None:
    pool = made("p")
    place(pool, "a", 1000, handover="y")
    assert waits(pool, 0.0) == {"p": 0.0}
    assert pool.close("a", 0.0) is not None


def test_what_is_done_early_moves_up_those_behind_it_and_only_those() -> None:
    pool = made()
    for n in range(3):
        place(pool, f"j{n}", 1000)
    pool.close("j1", 0.5)  # cancelled
    assert waits(pool, 0.5) == {"p": 1.5}
    assert [round(job.done_s, 6) for job in pool.jobs.values()] == [1.0, 2.0]
    pool.close("j0", 0.75)
    assert waits(pool, 0.75) == {"p": 1.0}
    pool.close("j2", 3.0)  # late: nothing to move
    assert waits(pool, 3.0) == {"p": 0.0}


def test_a_report_that_says_more_is_believed_and_so_is_one_of_having_nothing_to_do() -> None:
    pool = made()
    pool.on_report(report(running=1, queued_prefill_tokens=4000), SPEED, 0.0)
    assert waits(pool, 0.0) == {"p": 4.0}
    pool.on_report(report(running=1, queued_prefill_tokens=500), SPEED, 0.1)
    assert waits(pool, 0.1) == {"p": 3.9}, "more may lie in the queue than in the engine"
    pool.on_report(report(), SPEED, 0.2)
    assert waits(pool, 0.2) == {"p": 0.0}


def test_what_was_placed_just_now_is_not_forgotten_because_the_worker_has_not_seen_it() -> None:
    pool = made()
    place(pool, "a", 1000)
    pool.on_report(report(), SPEED, IN_TRANSIT_S / 2)
    assert waits(pool, IN_TRANSIT_S / 2)["p"] == pytest.approx(1.0 - IN_TRANSIT_S / 2)
    pool.on_report(report(), SPEED, IN_TRANSIT_S * 2)
    assert waits(pool, IN_TRANSIT_S * 2) == {"p": 0.0}


def test_jobs_of_a_worker_that_leaves_are_counted_at_those_that_stay() -> None:
    pool = made("pq")
    place(pool, "a", 1000, worker="p")
    place(pool, "b", 1000)
    assert pool.remove("p", 0.0) is not None
    assert waits(pool, 0.0) == {"q": 2.0}
    assert pool.remove("q", 0.0) is not None
    assert set(pool.jobs) == {"a", "b"}
    pool.expire(60.0)
    assert pool.jobs == {}


def test_blocks_are_awaited_until_the_prompt_is_there() -> None:
    pool = made()
    place(pool, "a", 1000, blocks=5)
    place(pool, "b", 1000, blocks=0)
    place(pool, "c", 1000, blocks=7, decode="e")
    assert (pool.awaited_blocks("d"), pool.awaited_blocks("e"), pool.awaited_blocks("f")) == (5, 7, 0)
    pool.close("a", 1.0)
    pool.close("b", 1.0)
    assert pool.awaited_blocks("d") == 0


def test_a_job_is_given_as_much_time_again_before_it_is_forgotten() -> None:
    pool = made(grace_s=5.0)
    place(pool, "a", 10_000)
    pool.expire(24.9)
    assert set(pool.jobs) == {"a"}
    pool.expire(25.1)
    assert pool.jobs == {}


def test_steps_cost_time_beside_their_tokens() -> None:
    pool = made(step_tokens=1000)
    pool.ordered[0].speed = SpeedEstimate(0.1, 1000.0, 0.0)
    place(pool, "a", 2500)
    assert waits(pool, 0.0) == {"p": 2.75}


ACTIONS = st.lists(
    st.tuples(st.sampled_from(["place", "close", "report", "leave", "join", "pass"]), st.integers(0, 5), st.integers(0, 5000)),
    max_size=60,
)


@settings(deadline=None)
@given(actions=ACTIONS)
def test_whatever_happens_the_books_balance_and_time_frees_everybody(actions: list[tuple[str, int, int]]) -> None:
    pool = made("pq")
    now_s = 0.0
    for what, n, amount in actions:
        name = "pq"[n % 2]
        if what == "place":
            place(pool, f"j{n}", amount, now_s, blocks=n, worker=name if n % 3 == 0 and pool.get(name) else "")
        elif what == "close":
            pool.close(f"j{n}", now_s)
        elif what == "report" and pool.get(name) is not None:
            pool.on_report(report(name, running=n % 2, queued_prefill_tokens=amount if n % 2 else 0), SPEED, now_s)
        elif what == "leave":
            pool.remove(name, now_s)
        elif what == "join":
            pool.put(WorkerInfo(worker=name, slots=8, role="prefill", handover="x"), SPEED)
        else:
            now_s += amount / 1000
        assert pool.awaited_blocks("d") == sum(job.blocks for job in pool.jobs.values())
        assert 0 <= pool.queued_tokens(now_s) <= sum(job.tokens for job in pool.jobs.values()) + 1e-6
        assert [one.column for one in pool] == list(range(len(pool)))
        for one in pool:
            assert set(one.jobs) <= set(pool.jobs)
    assert all(one.wait_s(now_s + 1e4) == 0 for one in pool)
    pool.expire(now_s + 1e6)
    assert pool.jobs == {}
