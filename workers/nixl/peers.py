"""The agents whose memory can be reached."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import structlog

from headrace.workers.nixl import metrics
from headrace.workers.nixl.card import Card
from headrace.workers.nixl.errors import BadCard, DriverFailed, PeerUnknown

log = structlog.get_logger()


class PeerDriver(Protocol):
    """The part of `driver.Driver` that peers use."""

    def add(self, metadata: bytes) -> str: ...
    def remove(self, peer: str) -> None: ...
    def prepare(self, agent: str | None, address: int, length: int, count: int) -> int: ...
    def unprepare(self, prepared: int) -> None: ...


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

    def __init__(self, meets: PeerDriver) -> None:
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
                metrics.PEERS.inc()
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
        metrics.PEERS.inc()
        log.info("agent.met", peer=name, blocks=card.blocks, block_bytes=card.block_bytes)

    def leave(self, name: str) -> None:
        """Refuse the peer from now on."""
        peer = self._peers.get(name)
        if peer is not None and not peer.leaving:
            peer.leaving = True
            metrics.PEERS.dec()

    def collect(self, name: str) -> None:
        """Drop a leaving peer for good."""
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
