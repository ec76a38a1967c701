"""Host memory and disk below the simulated device."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.blocks import block_chain
from headrace.workers.engine import KvEvent
from headrace.workers.sim.blocks import BlockManager, Content, LowerTiers
from headrace.workers.sim.decode_side import Loader
from headrace.workers.sim.run import SequenceRun
from headrace.workers.sim.settings import SimSettings, TimingModel
from headrace.workers.sim.tokens import bundled_vocabulary, expected_ids
from tests.support.sim_replay import replay
from tests.support.sim_world import NO_FAULTS, SIZE, World, contents, sequence

SMALL = {"blocks": 8, "context_length": 32}


def apply(view: set[tuple[str, int]], events: list[KvEvent]) -> None:
    for event in events:
        if event.kind == "cleared":
            view.clear()
        for value in event.hashes:
            if event.kind == "stored":
                assert (event.tier, value) not in view
                view.add((event.tier, value))
            else:
                view.remove((event.tier, value))


def truth(manager: BlockManager) -> set[tuple[str, int]]:
    view: set[tuple[str, int]] = set()
    apply(view, manager.inventory())
    return view


def test_evicted_blocks_go_down_and_a_prefix_found_there_comes_back():
    world = World()
    node = world.node("n", **SMALL, host_blocks=4, disk_blocks=8)
    prompt, other = [1] * 29, [2] * 29
    for name, tokens in (("a", prompt), ("b", other)):
        node.submit(name, tokens, max_tokens=1)
        world.run()
    chain = block_chain(prompt, SIZE)
    view = truth(node.manager)
    assert {tier for tier, value in view if value in chain} == {"host", "disk"}
    node.submit("c", prompt, max_tokens=3)
    world.run()
    first = node.outputs["c"][0][1]
    assert first.cached_tokens == 28
    assert first.extra == {"cached": {"device": 0, "host": 16, "disk": 12}}
    assert node.ids("c") == expected_ids(prompt, 3)
    assert node.scheduler.stats()["loaded_blocks"] == {"host": 4, "disk": 3}
    after = truth(node.manager)
    assert {("device", value) for value in chain} <= after
    assert not {(tier, value) for tier, value in after if tier != "device" and value in chain}, "it moved"


def test_every_move_is_an_event_with_its_tier():
    world = World()
    node = world.node("n", **SMALL, host_blocks=4, disk_blocks=4)
    for n in range(3):
        node.submit(str(n), [n] * 29, max_tokens=1)
        world.run()
    assert {(event.kind, event.tier) for event in node.events} == {
        ("stored", "device"),
        ("removed", "device"),
        ("stored", "host"),
        ("removed", "host"),
        ("stored", "disk"),
        ("removed", "disk"),
    }
    lower = next(event for event in node.events if event.tier == "host" and event.kind == "stored")
    assert len(lower.token_ids) == SIZE


def test_a_load_takes_the_time_of_its_bytes_on_each_tier():
    world = World()
    timing = {"kv_bytes_per_token": 1.0, "host_bytes_per_s": 8.0, "disk_bytes_per_s": 4.0}
    node = world.node("n", **SMALL, host_blocks=4, disk_blocks=8, timing_overrides=timing)
    for name, fill in (("a", 1), ("b", 2)):
        node.submit(name, [fill] * 29, max_tokens=1)
        world.run()
    began = world.now
    node.submit("c", [1] * 29, max_tokens=1)
    node.submit("other", [3], max_tokens=1)
    world.run()
    assert node.ended_at("c") - began == pytest.approx(max(4 * SIZE / 8.0, 3 * SIZE / 4.0))
    assert node.ended_at("other") == began


def test_an_abort_during_a_load_leaves_the_content_where_it_was():
    world = World()
    node = world.node("n", **SMALL, host_blocks=8, timing_overrides={"kv_bytes_per_token": 1.0, "host_bytes_per_s": 1.0})
    for name, fill in (("a", 1), ("b", 2)):
        node.submit(name, [fill] * 29, max_tokens=1)
        world.run()
    node.submit("c", [1] * 29)
    world.run(5.0)
    assert node.used == 7
    node.scheduler.abort(["c"])
    assert node.used == 0
    node.submit("e", [1] * 29, max_tokens=1)
    world.run()
    assert node.outputs["e"][0][1].cached_tokens == 28


def test_what_is_being_loaded_is_not_pushed_out():
    events: list[KvEvent] = []
    tiers = LowerTiers(1, 1, events.append)
    first, second, third = (Content(n, None, (n,), None, None) for n in range(3))
    tiers.put(first)
    assert tiers.pin("host", 0) is first
    tiers.put(second)
    assert (tiers.find(0), tiers.find(1)) == ("host", "disk")
    tiers.put(third)
    assert (tiers.find(0), tiers.find(1), tiers.find(2)) == ("host", None, "disk")
    tiers.unpin("host", 0, moved=True)
    assert tiers.find(0) is None
    tiers.check()


def test_a_load_without_room_lets_go_of_all_it_found():
    manager = BlockManager(4, SIZE, host_blocks=2)
    prompt = [1] * 13
    chain = block_chain(prompt, SIZE)
    blocks = manager.allocate(3) or []
    manager.commit(blocks, contents(chain, prompt, SIZE))
    for block in blocks:
        manager.release([block])
    assert manager.allocate(2) == [3, blocks[0]]
    loader = Loader(manager, TimingModel(), clock=lambda: 0.0)
    run = SequenceRun(
        sequence("a", prompt), NO_FAULTS, settings=SimSettings(block_size=SIZE), vocabulary=bundled_vocabulary(), number=0
    )
    load = loader.plan(run, 0)
    assert load is not None
    assert (load.found, load.missing) == (["host", None, None], 1)
    assert manager.allocate(load.missing) is None
    loader.release(load)
    manager.check()
    assert manager.used == 2
    assert manager.lower is not None
    for n in range(2):
        manager.lower.put(Content(n, None, (n,), None, None))
    assert manager.lower.find(chain[0]) is None, "it is not pinned any more"


def test_a_reset_forgets_every_tier():
    world = World()
    node = world.node("n", **SMALL, host_blocks=8)
    for name, fill in (("a", 1), ("b", 2)):
        node.submit(name, [fill] * 29, max_tokens=1)
        world.run()
    node.manager.clear()
    assert truth(node.manager) == set()
    node.submit("c", [1] * 29, max_tokens=1)
    world.run()
    assert node.outputs["c"][0][1].cached_tokens == 0


requests = st.lists(
    st.tuples(st.integers(1, 28), st.integers(0, 3), st.integers(1, 6), st.integers(0, 5)), min_size=1, max_size=12
)


@settings(max_examples=100, deadline=None)
@given(
    requests, st.integers(0, 6), st.integers(0, 6), st.integers(8, 12), st.booleans(), st.sets(st.integers(0, 11), max_size=3)
)
def test_answers_books_and_events_are_right_whatever_moves_where(drawn, host, disk, blocks, slow, victims):
    world = World()
    timing = {"decode_base_s": 0.1, "kv_bytes_per_token": 1.0}
    if slow:
        timing |= {"host_bytes_per_s": 40.0, "disk_bytes_per_s": 10.0}
    node = world.node(
        "n", blocks=blocks, context_length=32, slots=3, host_blocks=host, disk_blocks=disk, timing_overrides=timing
    )
    for n, (length, family, most, pause) in enumerate(drawn):
        node.submit(str(n), [family] * length, max_tokens=most)
        world.run(pause * 0.15)
        if n in victims:
            node.scheduler.abort([str(n)])
    world.run()
    for n, (length, family, most, _) in enumerate(drawn):
        expected = expected_ids([family] * length, min(most, 32 - length))
        got = node.ids(str(n))
        assert got == expected or (n in victims and got == expected[: len(got)])
    load = node.scheduler.load()
    assert (load.running, load.waiting, load.blocks_used, load.queued_prefill_tokens) == (0, 0, 0, 0)
    view: set[tuple[str, int]] = set()
    apply(view, node.events)
    assert view == truth(node.manager)


def test_a_replay_offline_waits_for_loads_too():
    timing = {"kv_bytes_per_token": 1.0, "host_bytes_per_s": 8.0}
    options = SimSettings(block_size=SIZE, **SMALL, host_blocks=16, timing_overrides=timing)
    work = [(float(n), sequence(str(n), [n % 2] * 29, max_tokens=1)) for n in range(3)]
    done = replay(work, options)
    assert [line.cached_tokens for line in done.timelines] == [0, 0, 28]
    assert [line.ttft_s for line in done.timelines] == pytest.approx([0.0, 0.0, 7 * SIZE / 8.0])
