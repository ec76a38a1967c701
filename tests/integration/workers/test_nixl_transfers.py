"""Blocks between two processes over real NIXL: the right bytes in the right places, notices after them, many at once."""

from __future__ import annotations

import importlib.util
import random
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from headrace.workers.nixl.agent import Agent, unpack
from headrace.workers.nixl.descriptors import Arena, BadBlocks, BadCard, Closed, PeerUnknown
from tests.support.nixl_peer import PeerProcess, drive, fill, needs_nixl, sums

pytestmark = [needs_nixl, pytest.mark.slow]

BLOCKS = 96
BLOCK_BYTES = 40_000  # not a multiple of a page


@pytest.fixture(scope="module")
def peer() -> Iterator[PeerProcess]:
    process = PeerProcess(BLOCKS, BLOCK_BYTES, seed=7)
    yield process
    assert process.stop() == 0


@pytest.fixture
def arena() -> Arena:
    arena = Arena(BLOCKS, BLOCK_BYTES)
    fill(arena, seed=random.getrandbits(32))
    return arena


@pytest.fixture
def agent(arena: Arena) -> Iterator[Agent]:
    agent = Agent("test", arena)
    yield agent
    agent.close()


@pytest.mark.parametrize("order", ["random", "contiguous", "falling"])
@pytest.mark.parametrize("op", ["read", "write"])
def test_bytes_arrive_where_they_belong_and_nowhere_else(
    peer: PeerProcess, agent: Agent, arena: Arena, op: str, order: str
) -> None:
    name = agent.meet(peer.card)
    ours, theirs = sums(arena), peer.ask("sums")
    if order == "random":
        local, remote = random.sample(range(BLOCKS), 60), random.sample(range(BLOCKS), 60)
    else:
        local, remote = list(range(10, 70)), list(range(3, 63))
    if order == "falling":
        local, remote = local[::-1], remote[::-1]
    if op == "read":
        transfer = agent.read(name, remote, local)
        for into, source in zip(local, remote, strict=True):
            ours[into] = theirs[source]
    else:
        transfer = agent.write(name, local, remote)
        for source, into in zip(local, remote, strict=True):
            theirs[into] = ours[source]
    assert drive(agent) == [transfer]
    assert (transfer.state, transfer.settled, transfer.error) == ("done", True, "")
    assert (transfer.bytes, transfer.took_s > 0) == (60 * BLOCK_BYTES, True)
    assert transfer.descriptors == (1 if order != "random" else pytest.approx(55, abs=5))
    assert sums(arena) == ours
    assert peer.ask("sums") == theirs


def test_the_peer_can_do_the_same_to_us(peer: PeerProcess, agent: Agent, arena: Arena) -> None:
    name = peer.ask("meet", agent.card)
    assert name == agent.name
    theirs = peer.ask("sums")
    assert peer.ask("write", name, [1, 2, 3], [30, 20, 10]) == ("done", "")
    assert [sums(arena)[block] for block in (30, 20, 10)] == theirs[1:4]
    assert peer.ask("read", name, [50, 51], [8, 9]) == ("done", "")
    assert peer.ask("sums")[8:10] == sums(arena)[50:52]


def test_a_notice_comes_after_the_bytes_it_is_about(peer: PeerProcess, agent: Agent, arena: Arena) -> None:
    name = agent.meet(peer.card)
    for turn in range(5):
        fill(arena, seed=random.getrandbits(32))
        agent.write(name, range(BLOCKS), range(BLOCKS), notice=b"written %d" % turn)
        drive(agent)
        [(sender, data, seen)] = peer.notices(1)
        assert (sender, data) == (agent.name, b"written %d" % turn)
        assert seen == sums(arena)


def test_notices_go_both_ways_in_order(peer: PeerProcess, agent: Agent) -> None:
    name = agent.meet(peer.card)
    peer.ask("meet", agent.card)
    for number in range(20):
        assert agent.notify(name, b"\x00\xff%d" % number)
        assert peer.ask("notify", agent.name, b"back %d" % number)
    assert [data for _, data, _ in peer.notices(20)] == [b"\x00\xff%d" % number for number in range(20)]
    heard: list[tuple[str, bytes]] = []
    until_s = time.monotonic() + 30
    while len(heard) < 20 and time.monotonic() < until_s:
        heard += agent.poll()[1]
    assert heard == [(name, b"back %d" % number) for number in range(20)]


def test_many_transfers_at_once_do_not_mix(peer: PeerProcess, agent: Agent, arena: Arena) -> None:
    name = agent.meet(peer.card)
    theirs = peer.ask("sums")
    order = random.sample(range(BLOCKS), BLOCKS)
    transfers = [agent.read(name, [source], [into]) for source, into in zip(order, reversed(order), strict=True)]
    assert set(drive(agent)) == set(transfers)
    assert {transfer.state for transfer in transfers} == {"done"}
    ours = sums(arena)
    assert all(ours[into] == theirs[source] for source, into in zip(order, reversed(order), strict=True))


def test_blocks_outside_either_arena_cannot_be_named(peer: PeerProcess, agent: Agent, arena: Arena) -> None:
    name = agent.meet(peer.card)
    before = sums(arena)
    for remote, local in (([BLOCKS], [0]), ([0], [BLOCKS]), ([-1], [0]), ([0], [-1]), ([0, 1], [3, 3])):
        with pytest.raises(BadBlocks):
            agent.read(name, remote, local)
        with pytest.raises(BadBlocks):
            agent.write(name, remote, local) if len(remote) == 1 else agent.write(name, remote, [3, 3])
    assert agent.active == 0
    assert sums(arena) == before


def test_meeting_is_once_per_card_and_an_unknown_peer_is_refused(peer: PeerProcess, agent: Agent) -> None:
    with pytest.raises(PeerUnknown, match="nobody"):
        agent.read("nobody", [0], [0])
    assert not agent.notify("nobody", b"")
    assert agent.meet(peer.card) == agent.meet(peer.card)
    assert agent.knows(agent.meet(peer.card))


def test_a_forgotten_peer_is_unknown_until_it_is_met_again(peer: PeerProcess, agent: Agent) -> None:
    name = agent.meet(peer.card)
    agent.forget(name)
    agent.forget(name)
    assert not agent.knows(name)
    with pytest.raises(PeerUnknown):
        agent.read(name, [0], [0])
    agent.meet(peer.card)
    assert agent.read(name, [0], [0]) in drive(agent)


def test_cards_that_do_not_fit_are_refused(peer: PeerProcess, agent: Agent) -> None:
    with pytest.raises(BadCard, match="itself"):
        agent.meet(agent.card)
    with pytest.raises(BadCard, match="damaged"):
        agent.meet(peer.card.replace(b"nixl", b"n1xl"))
    other = Agent("small", Arena(4, BLOCK_BYTES // 2))
    with pytest.raises(BadCard, match=str(BLOCK_BYTES // 2)):
        agent.meet(other.card)
    other.close()


def test_agents_of_one_name_have_names_of_their_own(agent: Agent, arena: Arena) -> None:
    other = Agent("test", arena)
    assert other.name != agent.name
    assert unpack(other.card).agent == other.name
    other.close()


def test_a_closed_agent_says_so(arena: Arena) -> None:
    agent = Agent("closed", arena)
    agent.close()
    agent.close()
    for call in (agent.poll, lambda: agent.notify("p", b""), lambda: agent.meet(b""), lambda: agent.read("p", [0], [0])):
        with pytest.raises(Closed):
            call()
    assert agent.active == 0


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed, so nothing can import it")
def test_nixl_is_loaded_without_torch(peer: PeerProcess) -> None:
    assert "torch" not in peer.ask("modules")


@pytest.mark.slow
def test_loading_nixl_leaves_logging_alone() -> None:
    """In a process of its own: another test here may have NIXL loaded by an engine, which does not put it back."""
    show = "import logging; from headrace.workers.nixl.driver import bindings; bindings(); assert logging.raiseExceptions"
    subprocess.run([sys.executable, "-c", show], check=True, capture_output=True, timeout=60)
