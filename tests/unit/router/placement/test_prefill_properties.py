"""Whatever the requests and the queue are: decisions that can be carried out, with a reason."""

from __future__ import annotations

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.messages.requests import PrefillDecision
from headrace.router.placement.types import Placement, Shed
from tests.support.router.disagg_pool import LONG, apart, elsewhere
from tests.support.router.placement_pool import BLOCK, Pool, chain

REASONS = {
    True: {"pays", "always", "prefix_there", "near"},
    False: {"never", "no_prefill_worker", "short", "cached", "queue", "cheaper", "aggregated"},
}

TOKENS = st.integers(1, 60_000)
SLOTS = 8  # of a decode worker; what is in the queue already has one, and one is for the request


@settings(deadline=None)
@given(tokens=TOKENS, running=st.integers(0, SLOTS - 2), depths=st.lists(st.integers(0, 400_000), min_size=2, max_size=2))
def test_what_is_computed_locally_is_so_behind_any_deeper_queue(tokens: int, running: int, depths: list[int]) -> None:
    remote = []
    for depth in sorted(depths):
        pool = apart()
        pool.report("a", running=running)
        if depth:
            elsewhere(pool, "x", depth)
        pool.offer("r", tokens=tokens)
        decisions = pool.decide()  # nothing is decided while it is worth waiting for the prefill worker
        remote.append(not decisions or any(isinstance(one, Placement) and one.remote for one in decisions))
    assert remote == sorted(remote, reverse=True)


@settings(deadline=None)
@given(
    requests=st.lists(st.tuples(TOKENS, st.integers(0, 3)), max_size=12),
    prefill=st.sampled_from(["auto", "always", "never"]),
    unready=st.sampled_from(["local", "wait", "refuse"]),
    handovers=st.lists(st.sampled_from(["x", "y", ""]), min_size=1, max_size=4),
    senders=st.lists(st.sampled_from(["x", "y"]), max_size=3),
    aggregated=st.booleans(),
)
def test_every_decision_can_be_carried_out_and_has_a_reason(
    requests: list[tuple[int, int]], prefill: Any, unready: Any, handovers: list[str], senders: list[str], aggregated: bool
) -> None:
    pool = Pool("z" if aggregated else "", prefill=prefill, prefill_unready=unready)
    for n, word in enumerate(handovers):
        pool.join(f"d{n}", role="decode", handover=word)
    for n, word in enumerate(senders):
        pool.join(f"p{n}", role="prefill", handover=word)
    word_of = {f"d{n}": word for n, word in enumerate(handovers)}
    for n, (tokens, family) in enumerate(requests):
        pool.offer(f"r{n}", chain(family, tokens // BLOCK), tokens=tokens)
    seen = 0
    for _ in range(60):
        for one in pool.decide():
            seen += 1
            if isinstance(one, Shed):
                assert (one.code, unready) == ("no_prefill_worker", "refuse")
                continue
            pool.event("prefilled", one.request.id, one.worker)
            pool.event("settled", one.request.id, one.worker)
            decision = one.prefill
            assert decision is not None or (not senders and not any(handovers))
            if decision is None:
                continue
            assert decision.reason in REASONS[decision.remote]
            assert not (decision.remote and prefill == "never")
            if decision.remote:
                assert word_of[one.worker] in senders
                assert decision.worker in ("", *(f"p{n}" for n, word in enumerate(senders) if word == word_of[one.worker]))
                assert decision.wait_s > 0
            elif prefill == "always":
                assert word_of.get(one.worker, "") not in senders
        pool.pass_time(0.5)
    if unready != "wait":
        assert seen == len(requests)


def test_the_decision_fits_the_header() -> None:
    pool = apart()
    pool.offer("r", LONG)
    decision = pool.placement().prefill
    assert isinstance(decision, PrefillDecision)
