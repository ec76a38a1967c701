"""What blocks hold as bytes, and the endpoint that moves them, over an agent that only notes what it is asked."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.workers.errors import TransferFailed
from headrace.workers.nixl.descriptors import Arena, BadBlocks, BadCard
from headrace.workers.sim import nixl_fabric
from headrace.workers.sim.fabric import Notice
from headrace.workers.sim.nixl_fabric import LEAST_BYTES, Contents, NixlEndpoint

CELLS = [1, 2**63 + 5, 2**64 - 1]


def value(counter: Any, *labels: str) -> float:
    return (counter.labels(*labels) if labels else counter)._value.get()


# -- contents ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [LEAST_BYTES, 16384])
@pytest.mark.parametrize("cell", CELLS)
def test_a_stamped_block_says_what_it_holds(size, cell):
    contents = Contents(Arena(2, size))
    contents.stamp(1, cell)
    assert contents.read(1) == cell


@pytest.mark.parametrize("at", [0, 7, 8, 15, 16, 100, 255])
def test_any_wrong_byte_shows(at):
    arena = Arena(1, 256)
    contents = Contents(arena)
    contents.stamp(0, 77)
    arena.view(0)[at] ^= 1
    assert contents.read(0) is None


def test_half_a_transfer_shows():
    arena = Arena(2, 4096)
    contents = Contents(arena)
    contents.stamp(0, 5)
    contents.stamp(1, 6)
    arena.view(1)[:2048] = arena.view(0)[:2048]
    assert contents.read(1) is None


def test_an_overwritten_block_holds_something_else_each_time():
    contents = Contents(Arena(1, 256))
    contents.stamp(0, 5)
    seen = {5}
    for _ in range(5):
        contents.overwrite(0)
        cell = contents.read(0)
        assert cell is not None, "it is content, of something else"
        assert cell not in seen
        seen.add(cell)
    contents.stamp(0, 5)
    assert contents.read(0) == 5


def test_a_block_that_others_wrote_to_is_stamped_anew_even_if_it_looks_right():
    arena = Arena(1, 4096)
    contents = Contents(arena)
    contents.stamp(0, 5)
    contents.expect([0])
    arena.view(0)[100] ^= 1  # a transfer that broke off behind the first bytes
    contents.stamp(0, 5)
    assert contents.read(0) == 5


# -- the endpoint --------------------------------------------------------------------------------------------


class FakeTransfer:
    state = "active"
    settled = False
    error = ""


class FakeAgent:
    """Cards are agent names; `dead` ones cannot be met."""

    def __init__(self) -> None:
        self.name, self.card = "me", b"my card"
        self.peers: set[str] = set()
        self.dead: set[str] = set()
        self.meetings: list[str] = []
        self.sent: list[tuple[str, Notice]] = []
        self.inbox: list[tuple[str, bytes]] = []
        self.active = self.unsettled = self.polls = 0
        self.closed = False
        self.transfer: Any = FakeTransfer()

    def meet(self, card: bytes) -> str:
        name = card.decode()
        self.meetings.append(name)
        if name in self.dead:
            raise BadCard(name)
        self.peers.add(name)
        return name

    def forget(self, peer: str) -> None:
        self.peers.discard(peer)

    def knows(self, peer: str) -> bool:
        return peer in self.peers

    def notify(self, peer: str, data: bytes) -> bool:
        self.sent.append((peer, msgspec.msgpack.decode(data, type=Notice)))
        return peer not in self.dead

    def poll(self) -> tuple[list[Any], list[tuple[str, bytes]]]:
        self.polls += 1
        inbox, self.inbox = self.inbox, []
        return [], inbox

    def read(self, *args: Any) -> Any:
        if isinstance(self.transfer, Exception):
            raise self.transfer
        return self.transfer

    write = read

    def close(self) -> None:
        self.closed = True


class Listener:
    def __init__(self) -> None:
        self.notices: list[Notice] = []

    def read(self, blocks: Any) -> Any: ...

    def write(self, blocks: Any, cells: Any) -> bool:
        return True

    def notice(self, notice: Notice) -> None:
        self.notices.append(notice)


class Rig:
    def __init__(self) -> None:
        self.agent = FakeAgent()
        self.arena = Arena(4, 256)
        self.member = Listener()
        self.now = 100.0
        self.endpoint = NixlEndpoint(self.agent, Contents(self.arena), self.member, clock=lambda: self.now)  # type: ignore[arg-type]

    def poll(self) -> None:
        self.now += 0.1
        self.endpoint.poll()


def packed(**fields: Any) -> bytes:
    return msgspec.msgpack.encode(Notice(key="k", **fields))


def test_peers_that_vanish_are_forgotten_and_the_others_stay():
    rig = Rig()
    rig.endpoint.meet({"w1": b"one", "w2": b"two", "w3": b""})
    assert rig.agent.peers == {"one", "two"}
    rig.endpoint.meet({"w2": b"two"})
    assert rig.agent.peers == {"two"}
    assert not rig.endpoint.reaches("one")
    assert rig.agent.meetings == ["one", "two"], "who is known is not met again"


def test_a_connection_is_made_when_engines_meet_not_by_their_first_hand_over():
    rig = Rig()
    rig.endpoint.meet({"w1": b"one"})
    assert [(peer, notice.key) for peer, notice in rig.agent.sent] == [("one", "")]
    rig.endpoint.meet({"w1": b"one"})
    assert len(rig.agent.sent) == 1


def test_a_worker_that_comes_back_with_another_engine_is_met_anew_and_the_old_one_forgotten():
    rig = Rig()
    rig.endpoint.meet({"w": b"old"})
    rig.endpoint.meet({"w": b"new"})
    assert rig.agent.peers == {"new"}


def test_a_peer_that_was_lost_is_tried_again_but_not_all_the_time():
    rig = Rig()
    rig.endpoint.meet({"w": b"one"})
    rig.agent.peers.clear()  # NIXL found it disconnected
    rig.agent.dead.add("one")
    for _ in range(10):
        assert not rig.endpoint.reaches("one")
        rig.endpoint.meet({"w": b"one"})
    assert rig.agent.meetings == ["one", "one"]
    rig.agent.dead.clear()
    rig.now += 1.0
    assert rig.endpoint.reaches("one")


def test_a_card_that_cannot_be_used_is_counted_and_stops_nobody():
    rig = Rig()
    rig.agent.dead.add("bad")
    before = value(nixl_fabric.STRANGE, "card")
    rig.endpoint.meet({"w1": b"bad", "w2": b"good"})
    assert rig.agent.peers == {"good"}
    assert value(nixl_fabric.STRANGE, "card") == before + 1


def test_who_registers_is_introduced_with_it():
    rig = Rig()
    rig.agent.peers.add("p")
    rig.endpoint.notify("p", Notice(kind="register", key="k", sender="me", blocks=(1,)))
    rig.endpoint.notify("p", Notice(kind="fetched", key="k", sender="me"))
    assert [notice.card for _, notice in rig.agent.sent] == [b"my card", b""]
    rig.agent.inbox = [("other", packed(kind="register", sender="x", card=b"other"))]
    rig.poll()
    assert rig.endpoint.reaches("other")
    assert [notice.sender for notice in rig.member.notices] == ["other"], "NIXL knows who sent it"


def test_notices_that_cannot_be_read_are_counted_and_stop_nobody():
    rig = Rig()
    before = value(nixl_fabric.STRANGE, "notice")
    rig.agent.inbox = [("a", b"\xc1"), ("a", packed(kind="fetched", sender="a"))]
    rig.poll()
    assert [notice.kind for notice in rig.member.notices] == ["fetched"]
    assert value(nixl_fabric.STRANGE, "notice") == before + 1


def test_an_engine_that_is_not_known_cannot_be_told():
    assert not Rig().endpoint.notify("nobody", Notice(kind="fetched", key="k", sender="me"))


@pytest.mark.parametrize("error", [BadBlocks("no such block"), TransferFailed("no such peer")])
def test_a_transfer_that_cannot_begin_has_failed(error):
    rig = Rig()
    rig.agent.transfer = error
    for transfer in (rig.endpoint.read("p", [0], [1]), rig.endpoint.write("p", [0], [1])):
        assert (transfer.ended, transfer.failed, transfer.settled) == (True, True, True)
        assert transfer.finish() == str(error)


def test_a_transfer_is_what_nixl_says_of_it():
    rig = Rig()
    transfer = rig.endpoint.read("p", [0], [1])
    assert (transfer.ended, transfer.failed, transfer.settled) == (False, False, False)
    rig.agent.transfer.state, rig.agent.transfer.error = "failed", "too late"
    assert (transfer.ended, transfer.failed, transfer.settled) == (True, True, False)
    assert transfer.finish() == "too late"


def test_blocks_that_arrive_broken_are_no_content_and_counted():
    rig = Rig()
    rig.endpoint.stamp([0, 1], [5, 6])
    assert rig.endpoint.content([0, 1]) == [5, 6]
    rig.arena.view(1)[99] ^= 1
    before = value(nixl_fabric.BROKEN)
    assert rig.endpoint.content([0, 1]) is None
    assert value(nixl_fabric.BROKEN) == before + 1


def test_it_looks_often_while_something_moves_and_seldom_otherwise():
    rig = Rig()
    endpoint = rig.endpoint
    rig.poll()
    idle = endpoint.poll_at(busy=False)
    busy = endpoint.poll_at(busy=True)
    rig.agent.active = 1
    moving = endpoint.poll_at(busy=True)
    assert idle is not None
    assert busy is not None
    assert moving is not None
    assert moving <= rig.now + 0.001 < busy < idle
    for _ in range(50):  # nothing is copied here: it is under way on a network
        endpoint.poll()
    waiting = endpoint.poll_at(busy=True)
    assert waiting is not None
    assert rig.now < waiting < busy


def test_a_batch_that_runs_does_not_look_at_every_step():
    rig = Rig()
    rig.poll()
    for _ in range(500):
        rig.now += 0.00001
        rig.endpoint.poll()
    assert 2 < rig.agent.polls < 20


def test_an_endpoint_that_left_does_nothing_more():
    rig = Rig()
    rig.endpoint.meet({"w": b"one"})
    rig.endpoint.leave()
    assert rig.agent.closed
    rig.agent.inbox = [("one", packed(kind="fetched", sender="one"))]
    rig.poll()
    rig.endpoint.meet({"w": b"two"})
    assert rig.agent.meetings == ["one"]
    assert not rig.member.notices
    assert not rig.endpoint.reaches("one")
    assert rig.endpoint.poll_at(busy=True) is None
