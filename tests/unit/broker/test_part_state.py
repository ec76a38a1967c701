"""What orchestrators are told of a part: while it starts, serves, hangs and stops."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.part_state import PartState, Standing


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


def test_a_part_that_starts_lives_and_is_not_ready_however_long_it_takes() -> None:
    clock = Clock()
    state = PartState("worker", silence_s=5.0, clock=clock)
    clock.now += 900.0
    assert state.live().ok
    assert (state.ready().ok, state.ready().body["reason"]) == (False, "starting")
    assert (state.health().ok, state.health().body["up_s"]) == (False, 900.0)


def test_what_a_start_is_at_is_told_until_the_part_stands() -> None:
    state = PartState("worker")
    state.starts("engine 'sim' is starting")
    assert state.ready().body["reason"] == "engine 'sim' is starting"
    state.publish(Standing(ready=True, healthy=True))
    state.starts("too late")
    assert state.ready().ok


@pytest.mark.parametrize(("ready", "healthy", "why"), [(True, True, ""), (False, True, "sleeps"), (False, False, "dead")])
def test_the_last_standing_is_told(ready: bool, healthy: bool, why: str) -> None:
    state = PartState("router")
    state.publish(Standing(ready=ready, healthy=healthy, why=why, facts={"role": "decode"}))
    assert (state.ready().ok, state.health().ok) == (ready, healthy)
    assert state.ready().body["reason"] == (why or None)
    assert state.health().body["reason"] == (why or None)
    assert (state.health().body["component"], state.health().body["role"]) == ("router", "decode")


def test_a_loop_that_publishes_nothing_any_more_is_not_alive() -> None:
    clock = Clock()
    state = PartState("worker", silence_s=5.0, clock=clock)
    state.publish(Standing(ready=True, healthy=True))
    clock.now += 4.9
    assert state.live().ok
    assert state.ready().ok
    clock.now += 0.2
    for answer in (state.live(), state.ready(), state.health()):
        assert not answer.ok
        assert "has done nothing for 5 s" in answer.body["reason"]


async def test_a_part_that_stops_lives_to_its_end_and_is_not_ready() -> None:
    clock = Clock()
    state = PartState("worker", silence_s=5.0, clock=clock)
    task = asyncio.create_task(state.keep(lambda: Standing(ready=True, healthy=True), every_s=0.001))
    await asyncio.sleep(0.02)
    assert state.ready().ok
    task.cancel()
    await asyncio.wait([task])
    clock.now += 60.0
    assert state.live().ok
    assert (state.ready().ok, state.ready().body["reason"]) == (False, "stopping")
