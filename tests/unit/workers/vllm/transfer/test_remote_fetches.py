"""Waiting for blocks of another engine has an end, and the memory they were to go into is taken back when that is safe."""

from __future__ import annotations

from headrace.workers.vllm.transfer.remote_fetches import GRACE_S, STALL_S, Fetches

LEASE_S = 30.0


class Bench:
    def __init__(self) -> None:
        self.now = 1000.0
        self.fetches = Fetches(lease_s=LEASE_S, clock=lambda: self.now)

    def look(self, **receiving: bool) -> dict[str, str]:
        return self.fetches.look(receiving)


def test_a_fetch_without_progress_is_given_up() -> None:
    bench = Bench()
    bench.fetches.began("a")
    assert bench.look(a=True) == {}
    bench.now += STALL_S - 0.1
    assert bench.look(a=True) == {}
    bench.now += 0.1
    assert "no blocks came" in bench.look(a=True)["a"]


def test_a_prefill_side_that_is_gone_is_not_waited_for() -> None:
    bench = Bench()
    bench.fetches.began("a")
    bench.fetches.began("b")
    assert "cannot be reached" in bench.look(a=False, b=True)["a"]


def test_waiting_for_a_place_is_no_waiting_for_blocks() -> None:
    bench = Bench()
    bench.fetches.began("a")
    for _ in range(5):
        assert bench.look() == {}
        bench.now += STALL_S
    assert bench.look(a=True) == {}  # only now does its time begin
    bench.now += STALL_S - 0.1
    assert bench.look(a=True) == {}


def test_a_fetch_that_has_ended_is_forgotten() -> None:
    bench = Bench()
    bench.fetches.began("a")
    bench.look(a=True)
    bench.fetches.ended("a")
    bench.now += STALL_S
    assert bench.look(a=True) == {}
    assert not bench.fetches


def test_the_blocks_of_an_aborted_fetch_are_taken_back_when_the_lease_is_over() -> None:
    bench = Bench()
    bench.fetches.began("a")
    bench.fetches.aborted("a")
    assert bench.fetches
    assert not bench.fetches.waiting
    bench.now += LEASE_S + GRACE_S - 0.1
    assert bench.fetches.due() == []
    bench.now += 0.1
    assert bench.fetches.due() == ["a"]
    assert bench.fetches.due() == []
    assert not bench.fetches


def test_a_sequence_aborted_after_its_first_token_holds_nothing_back() -> None:
    bench = Bench()
    bench.fetches.began("a")
    bench.fetches.ended("a")
    bench.fetches.aborted("a")
    assert not bench.fetches
