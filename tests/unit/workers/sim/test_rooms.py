"""Rendezvous: both sides of a hand-over meet in a room, and neither waits there without end."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.workers.engine import Handover
from headrace.workers.sim.settings import SequenceFaults
from headrace.workers.sim.tokens import expected_ids
from tests.support.sim_world import Node, World
from tests.unit.workers.sim.handover_bench import PROMPT, RENDEZVOUS


def meet(node: Node, kind: Any, name: str = "a", room: int = 7, **options: Any) -> None:
    node.submit(name, PROMPT, handover=Handover(kind=kind, room=room, peer="p"), **options)


@pytest.mark.parametrize("late", ["prefill", "decode", "neither"])
def test_in_a_room_whoever_is_first_waits_for_the_other(late):
    world = World()
    p, d = world.pair(**RENDEZVOUS)
    if late != "prefill":
        meet(p, "prefill")
    if late != "decode":
        meet(d, "decode")
    if late != "neither":
        world.run(10.0)
        assert not p.ended("a")
        assert not d.outputs
        meet(p, "prefill") if late == "prefill" else meet(d, "decode")
    world.run()
    assert p.last("a").finish == "length"
    assert p.ids("a") == expected_ids(PROMPT, 1)
    assert d.ids("a") == expected_ids(PROMPT, 10)
    assert (p.used, d.used) == (0, 0)
    assert p.scheduler.idle
    assert d.scheduler.idle


@pytest.mark.parametrize("alone", ["prefill", "decode"])
def test_nobody_waits_in_a_room_for_ever(alone):
    world = World()
    nodes = dict(zip(("prefill", "decode"), world.pair(**RENDEZVOUS, room_timeout_s=4.0), strict=True))
    meet(nodes[alone], alone)
    world.run()
    fault = nodes[alone].fault("a")
    assert fault is not None
    assert fault.retriable
    assert nodes[alone].ended_at("a") == pytest.approx(4.0)
    assert nodes[alone].used == 0


@pytest.mark.parametrize("aborted", ["prefill", "decode"])
@pytest.mark.parametrize("steps", [0, 1])
@pytest.mark.parametrize("together", [True, False])
def test_an_abort_of_one_side_frees_the_other(aborted, steps, together):
    """Before or after the first step, and when the other side comes only after the abort."""
    world = World()
    p, d = world.pair(
        **RENDEZVOUS, timing_overrides={"decode_base_s": 1.0, "kv_bytes_per_token": 1.0, "transfer_bytes_per_s": 1.0}
    )
    sides = {"prefill": p, "decode": d}
    other = "decode" if aborted == "prefill" else "prefill"
    meet(sides[aborted], aborted)
    if together:
        meet(sides[other], other)
    world.run(steps * 2.5)
    sides[aborted].scheduler.abort(["a"])
    if not together:
        meet(sides[other], other)
    world.run()
    assert not sides[aborted].ended("a")
    fault = sides[other].fault("a")
    assert fault is not None
    assert fault.retriable
    assert sides[other].ended_at("a") < 20, "it was told, it did not wait"
    assert (p.used, d.used) == (0, 0)
    assert p.scheduler.idle
    assert d.scheduler.idle


def test_a_dead_peer_in_a_room_ends_with_a_fault_on_either_side():
    world = World()
    p, d = world.pair(**RENDEZVOUS)
    meet(p, "prefill", "x", 1)
    meet(d, "decode", "x", 1, faults=SequenceFaults(peer_dead=True))
    world.run()
    assert d.fault("x")
    assert p.fault("x")
    world = World()
    p, d = world.pair(**RENDEZVOUS, timing_overrides={"kv_bytes_per_token": 1.0, "transfer_bytes_per_s": 1.0})
    meet(p, "prefill")
    meet(d, "decode")
    world.run(1.0)
    d.kill()
    world.run()
    assert p.fault("a")
    assert p.used == 0
