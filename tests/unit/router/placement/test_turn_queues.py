"""Batch requests wait behind interactive ones, get a small share of a busy pool, and cost their tenant no turn."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.placement.fair_queue import ClassGroup
from headrace.router.placement.settings import FairnessSettings
from headrace.router.placement.turn_queues import TurnQueues
from headrace.router.placement.types import Waiting

PATIENCE_S = 1.0


def queues(*, share: float = 0.1) -> TurnQueues:
    return TurnQueues(FairnessSettings(batch_share=share, batch_patience_s=PATIENCE_S, default_output_tokens=0.0))


def add(turns: TurnQueues, request_id: str, request_class: str = "std", *, tenant: str = "a", tokens: int = 100) -> None:
    turns.add(
        Waiting(id=request_id, tokens=tokens, request_class=request_class, tenant=tenant, max_tokens=1, deadline_s=1e9),
        tokens=tokens,
    )


def ids(groups: object) -> list[list[str]]:
    assert isinstance(groups, list)
    return [[request.id for request in group.requests] for group in groups]


def test_batch_requests_are_offered_only_what_nobody_else_waits_for() -> None:
    turns = queues()
    add(turns, "b", "batch")
    (group,) = turns.groups(9, 0.0)
    assert (group.batch, group.kept) == (True, False)
    add(turns, "s")
    assert ids(turns.groups(9, 0.0)) == [["s"]]
    turns.place("s", uncached=100)
    assert ids(turns.groups(9, 0.0)) == [["b"]]


def test_moved_batch_requests_go_before_other_batch_requests() -> None:
    turns = queues()
    for request_id, name in (("b", "batch"), ("rb", "rb"), ("b2", "batch")):
        add(turns, request_id, name)
    assert ids(turns.groups(9, 0.0)) == [["rb"], ["b", "b2"]]


def test_in_a_busy_pool_batch_requests_get_their_share_behind_moved_work_and_are_kept() -> None:
    turns = queues()
    add(turns, "b", "batch")
    add(turns, "s")
    add(turns, "re", "re")
    assert ids(turns.groups(9, 0.0)) == [["re"], ["s"]]
    first, door, last = turns.groups(9, PATIENCE_S)
    assert ids([first, door, last]) == [["re"], ["b"], ["s"]]
    assert (door.batch, door.kept) == (False, True)


def test_a_pool_that_catches_up_now_and_then_owes_batch_requests_nothing() -> None:
    turns = queues()
    add(turns, "b", "batch")
    add(turns, "s")
    turns.groups(9, 0.0)
    turns.place("s", uncached=100)
    add(turns, "t")
    assert ids(turns.groups(9, PATIENCE_S)) == [["t"]]
    assert ids(turns.groups(9, 2 * PATIENCE_S)) == [["b"], ["t"]]


SIZES = st.lists(st.integers(1, 3000), min_size=5, max_size=5)


@settings(max_examples=30)
@given(st.floats(0.02, 0.5), SIZES, SIZES)
def test_the_share_of_a_flooded_pool_is_kept_to(share: float, batch: list[int], interactive: list[int]) -> None:
    turns = queues(share=share)
    for number in range(60):
        add(turns, f"b{number}", "batch", tokens=batch[number % 5])
        add(turns, f"s{number}", tokens=interactive[number % 5])
    turns.groups(9, 0.0)
    placed = {"b": 0.0, "s": 0.0}
    while len(turns.batch) and len(turns.interactive) > 1:
        request = turns.groups(9, PATIENCE_S)[0].requests[0]
        placed[request.id[0]] += request.tokens
        turns.place(request.id, uncached=request.tokens)
    assert placed["b"] == pytest.approx(share * (placed["b"] + placed["s"]), abs=3001)


def test_idle_capacity_that_batch_requests_had_is_not_taken_off_their_share() -> None:
    turns = queues()
    for number in range(50):
        add(turns, f"b{number}", "batch", tokens=10_000)
        turns.groups(9, 0.0)
        turns.place(f"b{number}", uncached=10_000)
    add(turns, "b", "batch")
    add(turns, "s")
    turns.groups(9, 0.0)
    assert ids(turns.groups(9, PATIENCE_S))[0] == ["b"]


def test_the_batches_of_a_tenant_cost_its_interactive_requests_no_turn() -> None:
    turns = queues()
    for number in range(50):
        add(turns, f"b{number}", "batch", tenant="a", tokens=10_000)
        turns.place(f"b{number}", uncached=10_000)
    add(turns, "one", tenant="a")
    add(turns, "two", tenant="b")
    groups = turns.groups(9, 0.0)
    assert ids(groups) == [["one", "two"]]
    assert isinstance(groups[0], ClassGroup)
    assert not groups[0].over_share


def test_a_placement_that_did_not_happen_is_taken_back_in_its_own_queue() -> None:
    turns = queues()
    add(turns, "b", "batch", tokens=500)
    add(turns, "s", tokens=500)
    waiting = [turns.batch.get("b"), turns.interactive.get("s")]
    for request in waiting:
        assert request is not None
        turns.place(request.id, uncached=500)
        turns.unplace(request, tokens=500)
    assert turns.counts() == {("batch", "a"): 1, ("std", "a"): 1}
    assert (turns.batch.accounts.counter("a"), turns.interactive.accounts.counter("a")) == (0.0, 0.0)


def test_deadlines_of_both_kinds_are_watched() -> None:
    turns = queues()
    turns.add(Waiting(id="b", tokens=1, request_class="rb", deadline_s=5.0), tokens=1)
    turns.add(Waiting(id="s", tokens=1, deadline_s=7.0), tokens=1)
    assert turns.next_deadline_s() == 5.0
    assert [request.id for request in turns.expired(6.0)] == ["b"]
    assert turns.next_deadline_s() == 7.0
    assert [request.id for request in turns] == ["s"]
