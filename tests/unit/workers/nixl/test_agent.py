"""Cards: what is wrong with one is said before NIXL sees it."""

from __future__ import annotations

import msgspec
import pytest

from headrace.workers.nixl import agent as cards
from headrace.workers.nixl.agent import Card, Peers, pack, unpack
from headrace.workers.nixl.descriptors import BadCard, DriverFailed, PeerGone, PeerUnknown


def packed() -> bytes:
    return cards.pack(agent="lender-1", metadata=b"metadata", address=4096, blocks=8, block_bytes=512)


def changed(**fields: object) -> bytes:
    return msgspec.msgpack.encode({**msgspec.msgpack.decode(packed()), **fields})


def test_a_card_says_what_was_put_in() -> None:
    card = cards.unpack(packed())
    assert (card.agent, card.metadata, card.address, card.blocks, card.block_bytes) == ("lender-1", b"metadata", 4096, 8, 512)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"not a card",
        packed()[:-1],
        changed(v=2),
        changed(metadata=b"metadatA"),
        changed(blocks=0),
        changed(block_bytes=-1),
        changed(address=0),
        changed(agent=7),
    ],
)
def test_a_card_that_is_not_right_is_refused(data: bytes) -> None:
    with pytest.raises(BadCard):
        cards.unpack(data)


def test_a_newer_card_may_say_more() -> None:
    assert cards.unpack(changed(more="words")).agent == "lender-1"


class FakeDriver:
    """Knows a peer by its metadata, which is its name here."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.prepared: set[int] = set()
        self.fails = ""
        self.handles = 0

    def add(self, metadata: bytes) -> str:
        name = metadata.decode()
        self.known.add(name)  # NIXL keeps half of what it fails to load
        if self.fails == "add":
            raise PeerGone("connection refused")
        return name

    def remove(self, peer: str) -> None:
        if peer not in self.known:
            raise DriverFailed("not found")
        self.known.remove(peer)

    def prepare(self, agent: str | None, address: int, length: int, count: int) -> int:
        if self.fails == "prepare":
            raise DriverFailed("not registered")
        self.handles += 1
        self.prepared.add(self.handles)
        return self.handles

    def unprepare(self, prepared: int) -> None:
        self.prepared.remove(prepared)


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


def card(name: str = "a", *, metadata: str = "", blocks: int = 4) -> Card:
    return unpack(pack(agent=name, metadata=(metadata or name).encode(), address=64, blocks=blocks, block_bytes=16))


def test_a_peer_is_prepared_once(driver: FakeDriver) -> None:
    peers = Peers(driver)
    peers.meet(card())
    peers.meet(card())
    assert "a" in peers
    assert driver.handles == 1


def test_another_card_of_the_same_agent_is_refused(driver: FakeDriver) -> None:
    peers = Peers(driver)
    peers.meet(card())
    with pytest.raises(BadCard, match="another card"):
        peers.meet(card(blocks=5))
    assert peers["a"].card.blocks == 4


@pytest.mark.parametrize("fails", ["add", "prepare"])
def test_a_failed_meeting_leaves_nothing(driver: FakeDriver, fails: str) -> None:
    peers, driver.fails = Peers(driver), fails
    with pytest.raises(BadCard, match="a"):
        peers.meet(card())
    assert "a" not in peers
    assert not driver.known
    driver.fails = ""
    peers.meet(card())
    assert "a" in peers


def test_metadata_of_someone_else_is_refused(driver: FakeDriver) -> None:
    peers = Peers(driver)
    with pytest.raises(BadCard, match="b"):
        peers.meet(card("a", metadata="b"))
    assert not driver.known


def test_a_leaving_peer_is_unknown_and_dropped_when_collected(driver: FakeDriver) -> None:
    peers = Peers(driver)
    peers.meet(card())
    peers.leave("a")
    with pytest.raises(PeerUnknown):
        peers["a"]
    assert driver.known == {"a"}
    peers.collect("a")
    assert not driver.known
    assert not driver.prepared


def test_a_leaving_peer_that_is_met_again_stays(driver: FakeDriver) -> None:
    peers = Peers(driver)
    peers.meet(card())
    peers.leave("a")
    peers.meet(card())
    peers.collect("a")
    assert "a" in peers
    assert driver.known == {"a"}
    assert driver.handles == 1
