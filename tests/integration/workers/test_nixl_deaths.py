"""Peers that die or stand still around a transfer, over real NIXL: a typed failure by the deadline, and memory that is safe."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from headrace.workers.nixl.agent import Agent
from headrace.workers.nixl.descriptors import Arena, BadCard, BlocksBusy, PeerUnknown
from tests.support.nixl_peer import PeerProcess, drive, needs_nixl, settle, sums

pytestmark = [needs_nixl, pytest.mark.fault]

BLOCKS = 192
BLOCK_BYTES = 1 << 20  # large enough that no transfer of all blocks ends within its first turn

Start = Callable[[], PeerProcess]


@pytest.fixture(params=["default", "tcp"])
def transport(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By default processes of one machine copy each other's memory inside our calls; over TCP bytes move on their own."""
    if request.param == "tcp":
        monkeypatch.setenv("UCX_TLS", "tcp")
    return str(request.param)


@pytest.fixture
def tcp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts peers and ends them."""
    peers: list[PeerProcess] = []

    def begin() -> PeerProcess:
        peers.append(PeerProcess(BLOCKS, BLOCK_BYTES, seed=len(peers)))
        return peers[-1]

    yield begin
    for peer in peers:
        if peer.process.is_alive():
            peer.signal(signal.SIGKILL)
        peer.stop()


def begin(agent: Agent, op: str, peer: str, timeout_s: float = 30.0) -> object:
    blocks = range(BLOCKS)
    return (
        agent.read(peer, blocks, blocks, timeout_s=timeout_s)
        if op == "read"
        else agent.write(peer, blocks, blocks, timeout_s=timeout_s)
    )


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_peer_killed_before_a_transfer_fails_it_and_its_successor_works(transport: str, start: Start, op: str) -> None:
    arena = Arena(BLOCKS, BLOCK_BYTES)
    agent, old = Agent("test", arena), start()
    name = agent.meet(old.card)
    begin(agent, op, name)
    drive(agent)
    old.signal(signal.SIGKILL)
    transfer = begin(agent, op, name)
    assert drive(agent) == [transfer]
    assert (transfer.state, transfer.reason, transfer.settled) == ("failed", "peer_gone", True)
    assert not agent.knows(name)
    with pytest.raises(PeerUnknown):
        begin(agent, op, name)
    with pytest.raises(BadCard):
        agent.meet(old.card)
    new = start()
    again = begin(agent, op, agent.meet(new.card))
    drive(agent)
    assert again.state == "done"
    assert sums(arena) == new.ask("sums")
    agent.close()


@pytest.mark.parametrize("op", ["read", "write"])
def test_a_peer_killed_during_a_transfer_fails_it(transport: str, start: Start, op: str) -> None:
    agent, peer = Agent("test", Arena(BLOCKS, BLOCK_BYTES)), start()
    name = agent.meet(peer.card)
    transfer = begin(agent, op, name)
    other = agent.read(name, [0], [0])
    peer.signal(signal.SIGKILL)
    drive(agent)
    assert (transfer.state, transfer.reason, agent.knows(name)) == ("failed", "peer_gone", False)
    assert other.state in ("done", "failed")
    settle(agent, transfer)
    agent.close()


@pytest.mark.parametrize("after_s", [0.001, 0.004, 0.01])
def test_a_peer_killed_while_we_are_inside_nixl_fails_it(start: Start, after_s: float) -> None:
    agent, peer = Agent("test", Arena(BLOCKS, BLOCK_BYTES)), start()
    name = agent.meet(peer.card)
    assert peer.process.pid is not None
    killer = threading.Timer(after_s, os.kill, (peer.process.pid, signal.SIGKILL))
    killer.start()
    try:
        while agent.knows(name):
            begin(agent, "read", name)
            drive(agent)
    finally:
        killer.join()
    assert agent.unsettled == 0
    agent.close()


def test_a_notice_to_a_dead_peer_says_so_and_drops_it(transport: str, start: Start) -> None:
    agent, peer = Agent("test", Arena(1, BLOCK_BYTES)), start()
    name = agent.meet(peer.card)
    assert agent.notify(name, b"hello")
    peer.notices(1)
    peer.signal(signal.SIGKILL)
    until_s = time.monotonic() + 30
    while agent.notify(name, b"are you there?"):
        assert time.monotonic() < until_s, "its death is never noticed"
        agent.poll()
        time.sleep(0.005)
    assert not agent.knows(name)
    agent.close()


@pytest.mark.usefixtures("tcp")
def test_a_stalled_read_ends_at_its_deadline_and_keeps_its_blocks_until_it_is_over(start: Start) -> None:
    arena = Arena(BLOCKS, BLOCK_BYTES)
    agent, peer = Agent("test", arena), start()
    name = agent.meet(peer.card)
    theirs = peer.ask("sums")
    agent.read(name, [0], [0])
    drive(agent)
    peer.signal(signal.SIGSTOP)
    transfer = agent.read(name, [5, 6, 7], [1, 2, 3], timeout_s=0.3)
    assert drive(agent) == [transfer]
    assert (transfer.state, transfer.reason, transfer.settled) == ("failed", "deadline", False)
    assert agent.knows(name)
    with pytest.raises(BlocksBusy, match="block 2"):
        agent.read(name, [9], [2])
    peer.signal(signal.SIGCONT)
    settle(agent, transfer)
    again = agent.read(name, [9], [2])
    drive(agent)
    assert again.state == "done"
    assert sums(arena)[2] == theirs[9]
    agent.close()


@pytest.mark.usefixtures("tcp")
def test_a_stalled_write_ends_at_its_deadline(start: Start) -> None:
    agent, peer = Agent("test", Arena(BLOCKS, BLOCK_BYTES)), start()
    name = agent.meet(peer.card)
    peer.signal(signal.SIGSTOP)
    transfer = begin(agent, "write", name, timeout_s=0.3)
    drive(agent)
    assert (transfer.state, transfer.reason, transfer.settled) == ("failed", "deadline", False)
    peer.signal(signal.SIGKILL)
    settle(agent, transfer)
    agent.close()


@pytest.mark.usefixtures("tcp")
def test_a_stalled_peer_can_be_forgotten_and_met_again(start: Start) -> None:
    arena = Arena(BLOCKS, BLOCK_BYTES)
    agent, peer = Agent("test", arena), start()
    name = agent.meet(peer.card)
    theirs = peer.ask("sums")
    peer.signal(signal.SIGSTOP)
    transfer = agent.read(name, [5], [1])
    agent.forget(name)
    assert drive(agent) == [transfer]
    assert (transfer.reason, transfer.settled, agent.knows(name)) == ("forgotten", False, False)
    peer.signal(signal.SIGCONT)
    settle(agent, transfer)
    agent.meet(peer.card)
    agent.read(name, [6], [1])
    drive(agent)
    assert sums(arena)[1] == theirs[6]
    agent.close()


def test_forgetting_a_peer_in_the_middle_ends_its_transfer_only(start: Start) -> None:
    agent, gone, other = Agent("test", Arena(BLOCKS, BLOCK_BYTES)), start(), start()
    first, second = agent.meet(gone.card), agent.meet(other.card)
    failed = begin(agent, "read", first)
    kept = agent.write(second, [0], [0])
    assert failed.state == "active"
    agent.forget(first)
    drive(agent)
    assert (failed.reason, kept.state) == ("forgotten", "done")
    settle(agent, failed)
    agent.close()


@pytest.mark.usefixtures("tcp")
def test_closing_with_a_stalled_transfer_returns_and_keeps_the_memory(start: Start) -> None:
    agent, peer = Agent("test", Arena(BLOCKS, BLOCK_BYTES)), start()
    name = agent.meet(peer.card)
    peer.signal(signal.SIGSTOP)
    transfer = agent.read(name, [5], [1])
    agent.close()
    assert (transfer.state, transfer.reason, transfer.settled) == ("failed", "closed", False)


def test_a_process_may_end_in_the_middle_of_a_transfer(transport: str, start: Start) -> None:
    lender, borrower = start(), start()
    name = borrower.ask("meet", lender.card)
    lender.signal(signal.SIGSTOP)
    blocks = list(range(BLOCKS))
    assert "active" in borrower.ask("leave while reading", name, blocks, blocks)
    borrower.process.join(30)
    assert borrower.process.exitcode == 0
