"""Prefill and decode apart, simulated: blocks arrive, wrong ones show, and nothing is kept or waited for without end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.workers.engine import Handover, Role
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.settings import SequenceFaults
from headrace.workers.sim.tokens import expected_ids
from tests.support.sim_world import World
from tests.unit.workers.sim.handover_bench import PROMPT, RENDEZVOUS, prefilled, pulling

# -- parameters, pulled --------------------------------------------------------------------------------------


def test_a_prefill_gives_one_token_and_parameters_and_keeps_its_blocks():
    world = World()
    p, _ = pulling(world)
    params = prefilled(world, p)
    assert p.ids("a") == expected_ids(PROMPT, 1)
    assert p.last("a").finish == "length"
    assert json.loads(json.dumps(params)) == params
    assert (params["engine"], params["request"], params["tokens"], params["blocks"]) == ("p", "a", 18, [0, 1, 2, 3, 4])
    assert (params["issued_at"], params["expires_at"], params["ttl_s"]) == (0.0, 30.0, 30.0)
    assert p.used == 5


def test_decode_fetches_the_blocks_and_answers_as_if_it_had_computed_them():
    world = World()
    p, d = pulling(world)
    d.decode("b", PROMPT, prefilled(world, p))
    world.run()
    assert d.ids("b") == expected_ids(PROMPT, 10)
    first = d.outputs["b"][0][1]
    assert (first.cached_tokens, first.extra) == (0, {"cached": {"device": 0}, "remote_tokens": 17})
    assert (p.used, d.used) == (0, 0)
    assert d.scheduler.stats()["fetched_blocks"] == 5


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(0, 2), st.integers(1, 12)), min_size=1, max_size=6),
    st.sampled_from(["pull", "push"]),
    st.integers(0, 12),
)
def test_every_hand_over_ends_right_and_leaves_nothing_behind(requests, mode, spare):
    world = World()
    p, d = world.pair(
        transfer_mode=mode,
        blocks=13 + spare,
        context_length=52,
        timing_overrides={"decode_base_s": 0.01, "kv_bytes_per_token": 1.0},
    )
    waiting = {str(n): ([family] * length, most) for n, (length, family, most) in enumerate(requests)}
    for name, (prompt, _) in waiting.items():
        p.prefill(name, prompt)
    for _ in range(2000):
        world.run(0.05)
        for name in [name for name in waiting if p.ended(name)]:
            prompt, most = waiting.pop(name)
            d.decode(name, prompt, p.params(name), max_tokens=most)
        if not waiting:
            break
    world.run()
    for n, (length, family, most) in enumerate(requests):
        assert d.ids(str(n)) == expected_ids([family] * length, most)
    assert (p.used, d.used) == (0, 0)
    assert p.scheduler.idle
    assert d.scheduler.idle


# -- leases --------------------------------------------------------------------------------------------------


def test_a_fetch_after_the_lease_of_reused_blocks_succeeds_and_gives_another_answer():
    world = World()
    p, d = pulling(world, lease_s=3.0, blocks=32)
    params = prefilled(world, p)
    world.run(10.0)
    p.submit("other", [5] * 100, max_tokens=20)  # takes nearly all blocks
    world.run()
    d.decode("b", PROMPT, params)
    world.run()
    assert d.last("b").finish == "length"
    assert len(d.ids("b")) == 10
    assert d.ids("b") != expected_ids(PROMPT, 10)
    assert d.scheduler.stats()["stale_fetches"] == 1
    d.submit("c", [*PROMPT, 1, 2, 3])
    world.run()
    assert d.outputs["c"][0][1].cached_tokens
    assert d.ids("c") != expected_ids([*PROMPT, 1, 2, 3], 10), "the wrong blocks are cached now, under the right names"
    d.manager.clear()
    d.submit("e", PROMPT)
    world.run()
    assert d.ids("e") == expected_ids(PROMPT, 10)


@pytest.mark.parametrize("how", ["abort", "release here", "release there", "decode aborted"])
def test_blocks_are_freed_at_once_when_somebody_says_so(how):
    world = World()
    p, d = pulling(world, slots=1)
    params = prefilled(world, p)
    assert p.used == 5
    assert p.member
    assert d.member
    match how:
        case "abort":
            p.scheduler.abort(["a"])
        case "release here":
            assert p.member.release({"request": "a"})
            assert not p.member.release({"params": params})
        case "release there":
            assert d.member.release({"params": params})
        case "decode aborted":
            d.decode("b", PROMPT, params)
            d.scheduler.abort(["b"])
    assert p.used == 0


# -- failures ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fault", [SequenceFaults(peer_dead=True), SequenceFaults(transfer_breaks=True)])
def test_unless_told_otherwise_a_failed_fetch_ends_the_sequence_with_a_retriable_fault_and_nothing_is_kept(fault):
    world = World()
    p, d = pulling(world)
    d.decode("b", PROMPT, prefilled(world, p), faults=fault)
    world.run()
    last = d.fault("b")
    assert last is not None
    assert (last.code, last.retriable) == ("transfer_failed", True)
    assert (p.used, d.used) == (0, 0)


def wrong(params: dict[str, Any], **changes: Any) -> dict[str, Any]:
    return {**params, **changes}


def test_parameters_that_cannot_be_meant_are_refused():
    world = World()
    p, d = pulling(world)
    params = prefilled(world, p)
    for given_params in (
        None,
        {},
        wrong(params, layout="another model"),
        wrong(params, mode="push"),
        wrong(params, tokens=400),
        wrong(params, blocks=[1]),
        wrong(params, chain=[1, 2, 3, 4]),
    ):
        with pytest.raises(RequestInvalid) as refused:
            d.decode("b", PROMPT, given_params)
        assert refused.value.param == "handover"
    with pytest.raises(RequestInvalid, match="another prompt"):
        d.decode("b", PROMPT[::-1], params)


def test_what_the_role_or_the_style_does_not_allow_is_refused():
    world = World()
    p, d = pulling(world)
    whole = world.node("w")
    rooms = world.node("r", Role.PREFILL, **RENDEZVOUS)
    for node, handover, error in (
        (p, Handover(kind="decode", params={}), UnsupportedByEngine),
        (d, Handover(kind="prefill"), UnsupportedByEngine),
        (whole, Handover(kind="prefill"), UnsupportedByEngine),
        (p, Handover(kind="prefill", room=1), UnsupportedByEngine),
        (rooms, Handover(kind="prefill"), RequestInvalid),
    ):
        with pytest.raises(error):
            node.submit("a", [1, 2], handover=handover)
        assert node.scheduler.idle


# -- pushed --------------------------------------------------------------------------------------------------


def test_pushed_blocks_arrive_and_both_sides_need_the_same_request():
    world = World()
    p, d = world.pair()
    params = prefilled(world, p)
    with pytest.raises(RequestInvalid, match="same request id"):
        d.decode("b", PROMPT, params)
    d.decode("a", PROMPT, params)
    world.run()
    assert d.ids("a") == expected_ids(PROMPT, 10)
    assert (p.used, d.used) == (0, 0)
