"""The NIXL agent of an engine: its memory, its peers, transfers between them, and notices."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import msgspec
import structlog
import xxhash

from headrace.workers.nixl import mover
from headrace.workers.nixl.descriptors import Arena, BadCard, Closed, DriverFailed, PeerUnknown, cut, indices, pair
from headrace.workers.nixl.driver import Driver
from headrace.workers.nixl.mover import Transfer, TransferJob, TransferQueue

# The card by which an agent introduces itself to its peers. It travels as bytes over NATS.

VERSION = 1


class Card(msgspec.Struct, frozen=True, kw_only=True):
    """An agent and its arena. `digest` guards `metadata`: it goes to a parser in C++ that we did not write."""

    v: int = VERSION
    agent: str
    metadata: bytes
    digest: int
    address: int
    blocks: int
    block_bytes: int


def pack(*, agent: str, metadata: bytes, address: int, blocks: int, block_bytes: int) -> bytes:
    digest = xxhash.xxh3_64_intdigest(metadata)
    card = Card(agent=agent, metadata=metadata, digest=digest, address=address, blocks=blocks, block_bytes=block_bytes)
    return msgspec.msgpack.encode(card)


def unpack(data: bytes) -> Card:
    """Read a card. Raises BadCard."""
    try:
        card = msgspec.msgpack.decode(data, type=Card)
    except msgspec.DecodeError as error:
        raise BadCard(f"a peer's card of {len(data)} bytes does not decode: {error}") from None
    if card.v != VERSION:
        raise BadCard(f"the card of {card.agent} has version {card.v}, we speak {VERSION}")
    if xxhash.xxh3_64_intdigest(card.metadata) != card.digest:
        raise BadCard(f"the card of {card.agent} is damaged: its metadata does not match its digest")
    if card.blocks < 1 or card.block_bytes < 1 or card.address < 1:
        raise BadCard(f"the card of {card.agent} describes no memory: {card.blocks} blocks of {card.block_bytes} bytes")
    return card


log = structlog.get_logger()


@dataclass(slots=True)
class Peer:
    """A met agent. `prepared`: the list of its blocks. `leaving`: dropped, but a transfer of it has not settled."""

    card: Card
    prepared: int
    leaving: bool = False


class Peers:
    """Metadata and prepared lists by agent name.

    Dropping a peer's metadata makes NIXL forget its transfers too, and then their ends can no longer be seen.  So a peer with
    unsettled transfers only leaves, and `collect` drops it later.
    """

    def __init__(self, meets: Driver) -> None:
        self._meets = meets
        self._peers: dict[str, Peer] = {}

    def __contains__(self, name: str) -> bool:
        peer = self._peers.get(name)
        return peer is not None and not peer.leaving

    def __getitem__(self, name: str) -> Peer:
        """Return a peer. Raises PeerUnknown."""
        peer = self._peers.get(name)
        if peer is None or peer.leaving:
            raise PeerUnknown(f"no agent {name} was met, or it was dropped since")
        return peer

    @property
    def names(self) -> list[str]:
        return list(self._peers)

    @property
    def leaving(self) -> list[str]:
        return [name for name, peer in self._peers.items() if peer.leaving]

    def meet(self, card: Card) -> None:
        """Meet the agent of a card. Raises BadCard, also for a card of an agent that is not reachable."""
        known = self._peers.get(card.agent)
        if known is not None:
            if known.card != card:
                raise BadCard(f"agent {card.agent} was met with another card; an agent's memory cannot change")
            if known.leaving:
                known.leaving = False
                mover.PEERS.inc()
            return
        try:
            name = self._meets.add(card.metadata)
        except DriverFailed as error:
            self._drop(card.agent)  # NIXL may have kept part of the metadata
            raise BadCard(f"agent {card.agent} cannot be met: {error}") from error
        if name != card.agent:
            self._drop(name)
            raise BadCard(f"the card of agent {card.agent} holds the metadata of {name}")
        try:
            prepared = self._meets.prepare(name, card.address, card.block_bytes, card.blocks)
        except DriverFailed as error:
            self._drop(name)
            raise BadCard(f"the blocks of agent {name} cannot be prepared: {error}") from error
        self._peers[name] = Peer(card, prepared)
        mover.PEERS.inc()
        log.info("agent.met", peer=name, blocks=card.blocks, block_bytes=card.block_bytes)

    def leave(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is not None and not peer.leaving:
            peer.leaving = True
            mover.PEERS.dec()

    def collect(self, name: str) -> None:
        peer = self._peers.get(name)
        if peer is None or not peer.leaving:
            return
        del self._peers[name]
        try:
            self._meets.unprepare(peer.prepared)
        except DriverFailed as error:
            log.warning("agent.not_released", peer=name, error=str(error))
        self._drop(name)
        log.info("agent.dropped", peer=name)

    def _drop(self, name: str) -> None:
        try:
            self._meets.remove(name)
        except DriverFailed as error:
            log.debug("agent.not_removed", peer=name, error=str(error))


_kept: list[object] = []
"""What a transfer may still use although its agent was closed. Never freed: that is the lesser evil."""


class Agent:
    """Reads and writes the blocks of other agents' arenas.

    Belongs to one thread.  No call waits for a peer; each lasts at most 4 to 8 ms, since between processes of one machine the
    copying happens inside the calls, in turns (`mover.TURN_S`).  So nothing moves on without `poll`:

    - while `active` is above 0, poll without a pause, giving way to others in between (`await asyncio.sleep(0)`).  Where a poll
      brings nothing several times in a row the bytes are on a network: pause then, 50 µs growing to 1 ms.
    - otherwise poll for notices as often as their delay matters, 1 to 5 ms; a poll that finds nothing costs about 2 µs.

    The blocks of an active or unsettled transfer belong to it.
    """

    def __init__(
        self, name: str, arena: Arena, *, timeout_s: float = 10.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        """Takes about half a second. `timeout_s`: deadline of transfers that name none. Raises NixlUnavailable."""
        self.name = f"{name}-{uuid.uuid4().hex[:12]}"
        self._arena = arena
        self._timeout_s = timeout_s
        self._clock = clock
        self._driver = Driver(self.name)
        self._registered = self._driver.register(arena.address, arena.size)
        self._blocks = self._driver.prepare(None, arena.address, arena.block_bytes, arena.blocks)
        self._mover = TransferQueue(self._driver, clock=clock, lost=self._lost)
        self._peers = Peers(self._driver)
        self._closed = False
        self.card: bytes = pack(
            agent=self.name,
            metadata=self._driver.metadata(),
            address=arena.address,
            blocks=arena.blocks,
            block_bytes=arena.block_bytes,
        )

    # -- peers -----------------------------------------------------------------------------------------------

    def meet(self, card: bytes) -> str:
        """Make a peer's memory reachable, once per card; the peer's agent name. Takes up to 40 ms the first time.

        Raises BadCard: damaged, our own, blocks of another size, or its agent is not reachable.
        """
        self._check_open()
        peer = unpack(card)
        if peer.agent == self.name:
            raise BadCard(f"{self.name} cannot meet itself")
        if peer.block_bytes != self._arena.block_bytes:
            raise BadCard(f"blocks of {peer.agent} have {peer.block_bytes} bytes, ours {self._arena.block_bytes}")
        self._peers.meet(peer)
        return peer.agent

    def forget(self, peer: str) -> None:
        """Fail this peer's transfers and drop what we know of it, as soon as those have settled. Unknown peers are ignored."""
        if self._closed or peer not in self._peers:
            return
        self._peers.leave(peer)
        self._mover.fail_peer(peer, "forgotten", f"agent {peer} was forgotten")
        self._collect()

    def knows(self, peer: str) -> bool:
        """Return true when transfers with this peer may be asked for."""
        return peer in self._peers

    # -- transfers and notices -------------------------------------------------------------------------------

    def read(
        self, peer: str, remote: Sequence[int], local: Sequence[int], *, notice: bytes = b"", timeout_s: float | None = None
    ) -> Transfer:
        """Copy the peer's blocks `remote` into our blocks `local`, pair by pair; then send the peer `notice` unless empty.

        The peer's engine takes no part.  Raises PeerUnknown, BadBlocks, BlocksBusy, Closed.
        """
        return self._start("read", peer, local, remote, notice, timeout_s)

    def write(
        self, peer: str, local: Sequence[int], remote: Sequence[int], *, notice: bytes = b"", timeout_s: float | None = None
    ) -> Transfer:
        """Copy our blocks `local` into the peer's blocks `remote`, pair by pair; the notice arrives after the bytes.

        Raises PeerUnknown, BadBlocks, BlocksBusy, Closed.
        """
        return self._start("write", peer, local, remote, notice, timeout_s)

    def notify(self, peer: str, data: bytes) -> bool:
        """Send a notice. False: the peer is not there (any more). True is no receipt."""
        self._check_open()
        if peer not in self._peers:
            return False
        try:
            self._driver.notify(peer, data)
        except DriverFailed as error:
            log.warning("notice.failed", peer=peer, error=str(error))
            self._lost(peer)
            self._collect()
            return False
        return True

    def poll(self) -> tuple[list[Transfer], list[tuple[str, bytes]]]:
        """Move transfers on. Returns those that ended since the last call, and new notices as (sender, data)."""
        self._check_open()
        notices = self._driver.notices()
        self._mover.advance()
        self._collect()
        return self._mover.take_ended(), notices

    @property
    def active(self) -> int:
        """Transfers under way, and those that ended but that no poll has returned yet."""
        return self._mover.active

    @property
    def unsettled(self) -> int:
        """Transfers that failed and may still touch memory; an occasional poll settles them when it can."""
        return self._mover.unsettled

    def close(self) -> None:
        """Fail what is under way and let go of everything. Twice is once."""
        if self._closed:
            return
        self._mover.fail_all("closed", f"agent {self.name} was closed")
        self._closed = True
        if self._mover.unsettled:
            log.warning("agent.kept", agent=self.name, transfers=self._mover.unsettled, meaning="its memory is not freed")
            _kept.append((self._driver, self._arena))
            return
        for name in self._peers.names:
            self._peers.leave(name)
            self._peers.collect(name)
        try:
            self._driver.unprepare(self._blocks)
            self._driver.deregister(self._registered)
        except DriverFailed as error:
            log.warning("agent.not_closed", agent=self.name, error=str(error))
        self._driver.close()

    # -- inside ----------------------------------------------------------------------------------------------

    def _start(
        self,
        op: Literal["read", "write"],
        name: str,
        local: Sequence[int],
        remote: Sequence[int],
        notice: bytes,
        timeout_s: float | None,
    ) -> Transfer:
        self._check_open()
        peer = self._peers[name]
        ours = indices(local, self._arena.blocks, "local")
        theirs = indices(remote, peer.card.blocks, "remote")
        ours, theirs = pair(ours, theirs, into="local" if op == "read" else "remote")
        self._mover.check_free(ours)
        now = self._clock()
        transfer = Transfer(op, name, ours, len(ours) * self._arena.block_bytes)
        job = TransferJob(
            transfer=transfer,
            parts=deque(cut(ours, theirs, block_bytes=self._arena.block_bytes)),
            make=partial(self._driver.make, "READ" if op == "read" else "WRITE", self._blocks, peer.prepared),
            began_s=now,
            deadline_s=now + (self._timeout_s if timeout_s is None else timeout_s),
            finish=partial(self._driver.notify, name, notice) if notice else None,
        )
        self._mover.start(job)
        self._collect()
        return transfer

    def _lost(self, peer: str) -> None:
        if peer not in self._peers:
            return
        self._peers.leave(peer)
        mover.PEERS_LOST.inc()
        log.warning("agent.lost", peer=peer)

    def _collect(self) -> None:
        for name in self._peers.leaving:
            self._mover.fail_peer(name, "peer_gone", f"agent {name} is gone")
            if not self._mover.unsettled_with(name):
                self._peers.collect(name)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"agent {self.name} was closed")
