"""Prefill and decode apart, simulated: blocks arrive, wrong ones show, and nothing is kept or waited for without end."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Handover, Role, Sequence
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.fabric import segments
from headrace.workers.sim.settings import Faults, SequenceFaults
from headrace.workers.sim.tokens import expected_ids
from tests.support.sim_world import SIZE, World
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


def test_what_decode_has_is_not_fetched():
    world = World()
    p, d = pulling(world)
    for name in ("b", "c"):
        d.decode(name, PROMPT, prefilled(world, p, name=name))
        world.run()
    first = d.outputs["c"][0][1]
    assert (first.cached_tokens, first.extra) == (16, {"cached": {"device": 16}, "remote_tokens": 1})
    assert d.scheduler.stats()["fetched_blocks"] == 5 + 1
    d.decode("e", PROMPT[:17], prefilled(world, p, PROMPT[:17], name="e"))
    world.run(0.5)
    assert d.scheduler.stats()["fetched_blocks"] == 6, "all was there, nothing fetched"
    assert p.used == 0, "and the other side knows"


def test_a_transfer_takes_the_time_of_its_bytes_and_descriptors():
    world = World()
    p, d = pulling(
        world, timing_overrides={"kv_bytes_per_token": 1e9, "transfer_bytes_per_s": 5e9, "transfer_per_descriptor_s": 1.0}
    )
    params = prefilled(world, p)
    began = world.now
    d.decode("b", PROMPT, params, max_tokens=1)
    world.run()
    assert d.ended_at("b") - began == pytest.approx(5 * SIZE / 5 + 1.0)


def test_descriptors_are_stretches_that_run_on_both_sides():
    assert segments([], []) == 0
    assert segments([3, 4, 5], [7, 8, 9]) == 1
    assert segments([3, 4, 9], [7, 8, 9]) == 2
    assert segments([3, 4, 5], [7, 9, 10]) == 2


def test_fetches_share_the_line():
    world = World()
    p, d = pulling(world, timing_overrides={"kv_bytes_per_token": 1.0, "transfer_bytes_per_s": float(SIZE)})
    offers = {name: prefilled(world, p, [n] * SIZE * 2, name) for n, name in enumerate("ab")}
    began = world.now
    for n, name in enumerate("ab"):
        d.decode(name, [n] * SIZE * 2, offers[name], max_tokens=1)
    world.run()
    assert [d.ended_at(name) - began for name in "ab"] == pytest.approx([2.0, 4.0])


def test_others_go_on_while_blocks_are_on_their_way():
    world = World()
    p, d = pulling(world, timing_overrides={"kv_bytes_per_token": 1.0, "transfer_bytes_per_s": 1.0, "decode_base_s": 0.1})
    params = prefilled(world, p)
    d.decode("slow", PROMPT, params)
    d.submit("other", [1], max_tokens=5)
    world.run()
    assert d.ended_at("other") < d.outputs["slow"][0][0]


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


def test_blocks_that_nobody_fetches_are_freed_when_the_lease_ends():
    world = World()
    p, _ = pulling(world, lease_s=3.0)
    prefilled(world, p)
    world.run(2.0)
    assert p.used == 5
    world.run(1.0)
    assert p.used == 0
    assert p.scheduler.stats()["handovers_expired"] == 1


def test_a_fetch_after_the_lease_is_right_as_long_as_the_blocks_were_not_reused():
    world = World()
    p, d = pulling(world, lease_s=3.0)
    params = prefilled(world, p)
    world.run(10.0)
    d.decode("b", PROMPT, params)
    world.run()
    assert d.ids("b") == expected_ids(PROMPT, 10)
    assert d.scheduler.stats()["stale_fetches"] == 0


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


def test_a_decode_side_that_waits_keeps_the_lease_alive():
    world = World()
    p, d = pulling(world, lease_s=3.0, slots=1, timing_overrides={"decode_base_s": 0.1})
    params = prefilled(world, p)
    d.submit("long", [1], max_tokens=100)
    world.run(0.2)
    d.decode("b", PROMPT, params)
    world.run(9.0)
    assert "b" not in d.outputs
    assert p.used == 5
    world.run()
    assert d.ids("b") == expected_ids(PROMPT, 10)
    assert p.scheduler.stats()["handovers_expired"] == 0


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


def test_an_answer_that_ends_with_its_first_token_hands_nothing_over():
    world = World()
    p, _ = pulling(world)
    p.submit("a", PROMPT, handover=Handover(kind="prefill"), faults=SequenceFaults())
    stop = expected_ids(PROMPT, 1)[0]
    p.scheduler.submit(
        Sequence(
            id="b",
            token_ids=PROMPT,
            prompt_tokens=len(PROMPT),
            sampling=Sampling(max_tokens=5, stop_token_ids=[stop]),
            handover=Handover(kind="prefill"),
        ),
        SequenceFaults(),
    )
    world.run(0.5)
    assert (p.last("b").finish, p.params("b")) == ("stop", None)
    assert p.params("a") is not None


# -- failures ------------------------------------------------------------------------------------------------


def test_a_dead_peer_costs_the_handshake_and_then_a_prefill():
    world = World()
    p, d = pulling(world, load_failure="recompute")
    params = prefilled(world, p)
    p.kill()
    began = world.now
    d.decode("b", PROMPT, params)
    world.run()
    assert d.ids("b") == expected_ids(PROMPT, 10)
    assert d.outputs["b"][0][0] - began == pytest.approx(5.0)
    assert d.scheduler.stats()["failed_fetches"] == 1


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


def test_a_peer_that_dies_during_the_transfer_is_noticed_at_its_end():
    world = World()
    p, d = pulling(world, load_failure="recompute", timing_overrides={"kv_bytes_per_token": 1.0, "transfer_bytes_per_s": 1.0})
    params = prefilled(world, p)
    d.decode("b", PROMPT, params)
    world.run(1.0)
    p.kill()
    world.run()
    assert d.ids("b") == expected_ids(PROMPT, 10)
    assert d.scheduler.stats()["failed_fetches"] == 1


def test_a_slow_line_is_slow():
    world = World()
    options = {"timing_overrides": {"kv_bytes_per_token": 1.0, "transfer_bytes_per_s": 20.0}}
    p, d = pulling(world, **options, faults=Faults(slow_transfer=3.0))
    params = prefilled(world, p)
    began = world.now
    d.decode("b", PROMPT, params, max_tokens=1)
    world.run()
    assert d.ended_at("b") - began == pytest.approx(3.0)


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


def test_an_expired_push_is_refused_not_stale():
    world = World()
    p, d = world.pair(lease_s=3.0, load_failure="recompute")
    params = prefilled(world, p)
    world.run(5.0)
    began = world.now
    d.decode("a", PROMPT, params)
    world.run()
    assert d.ids("a") == expected_ids(PROMPT, 10)
    assert d.scheduler.stats()["failed_fetches"] == 1
    assert d.outputs["a"][0][0] == began
