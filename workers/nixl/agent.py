"""The NIXL agent of an engine: its memory, its peers, transfers between them, and notices."""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Literal

import structlog

from headrace.workers.nixl import card as cards
from headrace.workers.nixl import metrics
from headrace.workers.nixl.arena import Arena
from headrace.workers.nixl.descriptors import cut, indices, pair
from headrace.workers.nixl.driver import Driver
from headrace.workers.nixl.errors import BadCard, Closed, DriverFailed
from headrace.workers.nixl.mover import TransferJob, TransferQueue
from headrace.workers.nixl.peers import Peers
from headrace.workers.nixl.transfer import Transfer

log = structlog.get_logger()

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
        self.card: bytes = cards.pack(
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
        peer = cards.unpack(card)
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
        """Drop a peer that NIXL found disconnected."""
        if peer not in self._peers:
            return
        self._peers.leave(peer)
        metrics.PEERS_LOST.inc()
        log.warning("agent.lost", peer=peer)

    def _collect(self) -> None:
        """Drop leaving peers that nothing refers to."""
        for name in self._peers.leaving:
            self._mover.fail_peer(name, "peer_gone", f"agent {name} is gone")
            if not self._mover.unsettled_with(name):
                self._peers.collect(name)

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"agent {self.name} was closed")
