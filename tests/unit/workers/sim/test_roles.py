"""A simulated engine that changes its role, and hand-overs that are let go, stall, or outlive those who wanted them."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.workers.engine import Capabilities, DisaggStyle, EngineConfig, Handover, Role
from headrace.workers.errors import EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.fabric import Notice
from headrace.workers.sim.settings import SequenceFaults, SimSettings, parse_settings
from headrace.workers.sim.tokens import expected_ids
from tests.support.sim_world import HoldingFabric, Node, World

PROMPT = list(range(10, 28))  # four whole blocks and a half
STALL = SequenceFaults(stall_transfer=True)
SLOW = {"timing_overrides": {"kv_bytes_per_token": 1.0, "transfer_bytes_per_s": 10.0}}  # 2 s for the prompt


def prefilled(world: World, node: Node, name: str = "a", **options: Any) -> Any:
    node.prefill(name, PROMPT, **options)
    world.run(0.4)
    return node.params(name)


def change(node: Node, role: Role) -> None:
    assert node.member is not None
    node.member.set_role(role)


def meet(node: Node, kind: Any, **options: Any) -> None:
    node.submit("a", PROMPT, handover=Handover(kind=kind, room=7, peer="p"), **options)


# -- roles ---------------------------------------------------------------------------------------------------


def test_blocks_on_offer_survive_a_change_of_role_until_they_are_fetched():
    world = World()
    p, d = world.pair()
    params = prefilled(world, p)
    change(p, Role.AGGREGATED)
    assert p.scheduler.load().blocks_used == 5
    p.submit("own", [1, 2, 3])
    d.decode("a", PROMPT, params)
    world.run()
    assert d.ids("a") == expected_ids(PROMPT, 10)
    assert p.ids("own") == expected_ids([1, 2, 3], 10)
    assert p.scheduler.load().blocks_used == 0


def test_blocks_on_offer_survive_a_change_of_role_until_the_lease_ends():
    world = World()
    p, _ = world.pair(lease_s=3.0)
    prefilled(world, p)
    change(p, Role.DECODE)
    assert p.used == 5
    world.run(3.0)
    assert p.used == 0


def test_an_engine_takes_the_hand_overs_of_its_role_and_plain_sequences_in_any():
    world = World()
    node = world.node("n", Role.AGGREGATED, disagg="params")
    for role in (Role.AGGREGATED, Role.PREFILL, Role.DECODE):
        change(node, role)
        for kind in ("prefill", "decode"):
            if kind != role.value:
                with pytest.raises(UnsupportedByEngine, match=f"no {kind} hand-overs"):
                    node.submit("x", PROMPT, handover=Handover(kind=kind))  # type: ignore[arg-type]
        node.submit(role.value, PROMPT)
        world.run(0.4)
        assert node.ids(role.value) == expected_ids(PROMPT, 10)
    change(node, Role.PREFILL)
    assert prefilled(world, node)["engine"] == "n"


def test_the_role_stays_while_a_sequence_is_inside():
    world = World()
    p, _ = world.pair()
    p.submit("a", PROMPT)
    with pytest.raises(UnsupportedByEngine, match="1 sequences are inside"):
        change(p, Role.DECODE)
    world.run()
    with pytest.raises(UnsupportedByEngine, match="'encode'"):
        change(p, Role.ENCODE)
    change(p, Role.DECODE)


async def test_an_engine_says_what_roles_it_can_have_and_how_it_hands_over():
    def config(role: Role, **args: Any) -> EngineConfig:
        return EngineConfig(model="m", served_name="m", role=role, args={"fabric": "local", **args})

    plain, able = SimEngine(), SimEngine()
    info = await plain.start(config(Role.AGGREGATED), lambda outputs: None)
    assert (info.handover, info.lease_s, info.address, info.transfer_card) == ("", 0.0, "", b"")
    assert plain.capabilities.roles == Capabilities().roles
    assert plain.capabilities.disagg is DisaggStyle.NONE
    with pytest.raises(UnsupportedByEngine, match="disagg"):
        await plain.set_role(Role.PREFILL)
    await plain.set_role(Role.AGGREGATED)
    await plain.release("a", None)
    plain.meet({"w": b"card"})

    info = await able.start(config(Role.AGGREGATED, disagg="params", block_size=16, lease_s=7), lambda outputs: None)
    assert (info.handover, info.lease_s) == ("sim/params/push/16x0", 7.0)
    assert info.address
    assert able.capabilities.roles == {Role.AGGREGATED, Role.PREFILL, Role.DECODE}
    assert able.capabilities.disagg is DisaggStyle.PARAMS
    await able.set_role(Role.PREFILL)

    rooms = SimEngine()
    assert (await rooms.start(config(Role.DECODE, disagg="rendezvous"), lambda outputs: None)).handover == "sim/rendezvous/32x0"
    for engine in (plain, able, rooms):
        await engine.stop(1.0)
    with pytest.raises(EngineStartFailed, match="disagg='none'"):
        await SimEngine().start(config(Role.PREFILL, disagg="none"), lambda outputs: None)


def test_push_and_failing_visibly_are_the_defaults():
    settings = SimSettings()
    assert (settings.transfer_mode, settings.load_failure) == ("push", "fail")


def test_real_blocks_are_bounded():
    assert parse_settings({}).block_bytes == 16384
    assert parse_settings({"fabric": "local"}).block_bytes == 0
    for wrong in ({"kv_block_bytes": 1 << 20, "blocks": 4097}, {"kv_block_bytes": 100}, {"kv_block_bytes": -64}):
        with pytest.raises(EngineStartFailed, match="kv_block_bytes"):
            parse_settings(wrong)


# -- letting go ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["prefill", "decode", "own parameters"])
def test_blocks_that_nobody_will_fetch_are_let_go_on_either_side(where):
    world = World()
    p, d = world.pair()
    params = prefilled(world, p)
    assert p.member is not None
    assert d.member is not None
    match where:
        case "prefill":
            p.member.release_sequence("a", None)
        case "decode":
            d.member.release_sequence("a", params)
        case "own parameters":
            p.member.release_sequence("a", params)
    assert p.used == 0
    p.member.release_sequence("a", None)
    d.member.release_sequence("a", {"another": "engine's"})
    d.decode("a", PROMPT, params)
    world.run(0.1)
    assert d.fault("a"), "told at once that they are gone"
    assert (p.used, d.used) == (0, 0)


def test_letting_go_of_a_room_ends_the_sequence_that_waits_in_it():
    world = World()
    p, _ = world.pair(disagg="rendezvous")
    meet(p, "prefill")
    world.run(0.4)
    assert p.used == 5
    assert p.member is not None
    p.member.release_sequence("a", None)
    world.run(0.4)
    assert p.fault("a")
    assert p.used == 0


def test_a_room_is_for_one_pair():
    world = World()
    p, _ = world.pair(disagg="rendezvous")
    meet(p, "prefill")
    with pytest.raises(RequestInvalid, match="room 7 is taken"):
        p.submit("b", PROMPT, handover=Handover(kind="prefill", room=7))


def test_a_prompt_computed_again_replaces_its_offer_and_late_words_about_the_old_one_mean_nothing():
    world = World()
    p, d = world.pair()
    old = prefilled(world, p)
    new = prefilled(world, p)
    assert p.used == 5, "the old offer's blocks are the same, or free"
    assert old["number"] != new["number"]
    assert d.member is not None
    d.member.release_sequence("a", old)
    assert p.used == 5
    d.decode("a", PROMPT, new)
    world.run()
    assert d.ids("a") == expected_ids(PROMPT, 10)
    assert (p.used, d.used) == (0, 0)


# -- transfers that take their time ---------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["pull", "push"])
def test_a_transfer_is_over_when_both_the_real_and_the_modelled_one_are(mode):
    for first in ("real", "modelled"):
        fabric = HoldingFabric()
        world = World(fabric)
        p, d = world.pair(transfer_mode=mode, **SLOW)
        d.decode("a", PROMPT, prefilled(world, p), max_tokens=1)
        began = world.now
        world.run(1.0 if first == "real" else 3.0)
        assert not d.outputs
        fabric.held[0].end()
        world.run(20.0)
        assert d.ended_at("a") - began == pytest.approx(2.0 if first == "real" else 3.0)
        assert d.ids("a") == expected_ids(PROMPT, 1)
        assert (p.used, d.used) == (0, 0)


@pytest.mark.parametrize(
    ("mode", "faulty"),  # who is pulled from takes no part
    [("pull", "decode"), ("push", "prefill"), ("push", "decode"), ("room", "prefill"), ("room", "decode")],
)
def test_a_stalled_transfer_ends_at_its_deadline_as_a_retriable_fault(mode, faulty):
    world = World()
    options: dict[str, Any] = {"disagg": "rendezvous"} if mode == "room" else {"transfer_mode": mode}
    p, d = world.pair(**options, transfer_timeout_s=4.0, room_timeout_s=6.0)
    faults = {faulty: STALL}
    if mode == "room":
        meet(p, "prefill", faults=faults.get("prefill", SequenceFaults()))
        meet(d, "decode", faults=faults.get("decode", SequenceFaults()))
    else:
        p.submit("a", PROMPT, handover=Handover(kind="prefill"), faults=faults.get("prefill", SequenceFaults()))
        world.run(0.4)
        d.decode("a", PROMPT, p.params("a"), faults=faults.get("decode", SequenceFaults()))
    began = world.now
    world.run(20.0)
    fault = d.fault("a")
    assert fault is not None
    assert (fault.code, fault.retriable) == ("transfer_failed", True)
    assert d.ended_at("a") - began == pytest.approx(6.0 if mode == "room" and faulty == "decode" else 4.0)
    assert (p.used, d.used) == (0, 0)
    assert p.scheduler.idle
    assert d.scheduler.idle


def test_a_transfer_that_never_ends_fails_at_its_deadline_and_keeps_its_target_until_it_has_settled():
    fabric = HoldingFabric()
    world = World(fabric)
    p, d = world.pair(transfer_mode="pull", transfer_timeout_s=4.0)
    d.decode("a", PROMPT, prefilled(world, p))
    world.run(10.0)
    assert d.fault("a")
    assert p.used == 0, "told that nobody will fetch them"
    assert d.used == 5, "may still be written to"
    fabric.held[0].end()
    world.run(0.0)
    assert d.used == 0


@pytest.mark.parametrize("who", ["decode", "prefill"])
def test_an_abort_during_a_write_frees_nothing_that_still_moves(who):
    fabric = HoldingFabric()
    world = World(fabric)
    p, d = world.pair()
    d.decode("a", PROMPT, prefilled(world, p))
    world.run(0.4)
    (d if who == "decode" else p).scheduler.abort(["a"])
    world.run(0.4)
    assert (p.used, d.used) == (5, 5)
    fabric.held[0].end()
    world.run(0.4)
    assert (p.used, d.used) == (0, 0)
    if who == "prefill":
        assert d.fault("a")


def test_what_a_dead_engine_was_to_write_to_is_free_again():
    fabric = HoldingFabric()
    world = World(fabric)
    p, d = world.pair()
    d.decode("a", PROMPT, prefilled(world, p))
    world.run(0.4)
    d.scheduler.abort(["a"])
    p.kill()
    world.run(1.0)
    assert d.used == 0


def test_a_dead_engine_is_noticed_while_it_is_to_write():
    fabric = HoldingFabric()
    world = World(fabric)
    p, d = world.pair()
    d.decode("a", PROMPT, prefilled(world, p))
    world.run(0.4)
    p.kill()
    began = world.now
    world.run()
    fault = d.fault("a")
    assert fault is not None
    assert "went away" in fault.message
    assert d.ended_at("a") - began < 1.0, "not only at the deadline"


def test_the_answer_to_an_earlier_try_is_not_taken_for_this_ones():
    fabric = HoldingFabric()
    world = World(fabric)
    p, d = world.pair(transfer_timeout_s=2.0)
    params = prefilled(world, p)
    d.decode("a", PROMPT, params)
    world.run(0.4)
    d.scheduler.abort(["a"])
    d.decode("a", PROMPT, prefilled(world, p))
    world.run(0.4)
    assert d.member is not None
    d.member.notice(Notice(kind="written", key="a", sender="p", ticket=1))
    world.run(0.0)
    assert "a" not in d.outputs
    for held in fabric.held:
        held.end()
    world.run()
    assert d.ids("a") == expected_ids(PROMPT, 10)
    assert (p.used, d.used) == (0, 0)


def test_an_engine_met_late_is_still_reached_within_the_handshake():
    world = World()
    p, d = world.pair()
    params = prefilled(world, p)
    assert p.member is not None
    world.fabric.members.pop("p")
    d.decode("a", PROMPT, params)
    world.run(1.0)
    assert "a" not in d.outputs
    world.fabric.members["p"] = p.member
    world.run()
    assert d.ids("a") == expected_ids(PROMPT, 10)


def test_a_lease_is_renewed_for_a_waiting_decode_side_in_push_mode_too():
    world = World()
    p, d = world.pair(lease_s=3.0, slots=1, timing_overrides={"decode_base_s": 0.1})
    params = prefilled(world, p)
    d.submit("long", [1], max_tokens=100)
    world.run(0.2)
    d.decode("a", PROMPT, params)
    world.run()
    assert d.ids("a") == expected_ids(PROMPT, 10)
    assert p.scheduler.stats()["handovers_expired"] == 0


def test_a_pushed_prompt_that_is_all_there_is_not_asked_for():
    world = World()
    p, d = world.pair()
    for name in ("a", "b"):
        p.prefill(name, PROMPT[:17])
        world.run(0.4)
        d.decode(name, PROMPT[:17], p.params(name))
        world.run(0.4)
        assert d.ids(name) == expected_ids(PROMPT[:17], 10)
    assert p.used == 0, "told that its blocks are not needed"
    assert p.scheduler.stats()["written_blocks"] == d.scheduler.stats()["fetched_blocks"] == 4
    assert d.scheduler.stats()["failed_fetches"] == 0
