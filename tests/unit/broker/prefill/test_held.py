"""A prefill job changes its state by its methods only, and only as its table allows."""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import pytest

from headrace.broker.messages.prefill import PrefillDone, PrefillJob
from headrace.broker.prefill.held import TRANSITIONS, HeldPrefill, HeldState
from headrace.broker.protocol.transitions import IllegalTransition
from headrace.jetstream.ports import Delivery

JOB = PrefillJob(job="j", id="r", attempt=1, decode="d-1", deadline=60.0, created=0.0, tokens=1, uncached=1)
DONE = PrefillDone(job="j", worker="p-1", params={"engine": "p-1"})

MOVES: dict[str, tuple[Callable[[HeldPrefill], None], HeldState]] = {
    "start": (lambda held: held.start(1.0), HeldState.RUNNING),
    "finish": (lambda held: held.finish(DONE, kept_until_s=2.0), HeldState.TELLING),
    "accept": (lambda held: held.accept(3.0), HeldState.HELD),
    "refuse": (lambda held: held.refuse(DONE), HeldState.TELLING),
    "forget": (HeldPrefill.forget, HeldState.GONE),
}


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("before", HeldState)
def test_each_method_reaches_its_state_or_raises(before: HeldState, name: str) -> None:
    method, after = MOVES[name]
    held = HeldPrefill(JOB, cast("Delivery", None), state=before)
    if after in TRANSITIONS[before]:
        method(held)
        assert held.state is after
    else:
        with pytest.raises(IllegalTransition):
            method(held)
        assert held.state is before


def test_whatever_ends_the_computation_wakes_the_waiter() -> None:
    for name in ("finish", "refuse", "forget"):
        held = HeldPrefill(JOB, cast("Delivery", None))
        MOVES[name][0](held)
        assert held.computed.is_set()
