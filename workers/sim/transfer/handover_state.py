"""State and terms that both sides of a hand-over share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, Literal

import msgspec

from headrace.workers.engine import DisaggStyle, Handover, Role
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.scheduling.blocks import BlockManager
from headrace.workers.sim.scheduling.handover_side import KvOffer, Side
from headrace.workers.sim.settings import SimSettings
from headrace.workers.sim.timing import TimingModel
from headrace.workers.sim.transfer.fabric import Endpoint


@dataclass(slots=True)
class PeerLink:
    """A link that carries one transfer after the other."""

    free_at: float = 0.0

    def reserve(self, now: float, duration_s: float) -> float:
        """Queue a transfer now. Returns the time at which it will be done."""
        self.free_at = max(now, self.free_at) + duration_s
        return self.free_at


@dataclass(slots=True, kw_only=True)
class HandoverWire:
    """An engine's part in hand-overs. `clock` is the engine's own; adding `wall_offset_s` makes it Unix time.

    `endpoint` is there once the engine has joined a fabric.
    """

    model: str
    role: Role
    settings: SimSettings
    timing: TimingModel
    manager: BlockManager
    clock: Callable[[], float]
    wall_offset_s: float = 0.0
    link: PeerLink = field(default_factory=PeerLink)
    endpoint: Endpoint = field(init=False)

    @property
    def engine(self) -> str:
        """The engine's name on the fabric."""
        return self.endpoint.engine

    @property
    def terms(self) -> str:
        """The terms that engines must have in common to hand over to each other."""
        settings = self.settings
        style = f"params/{settings.transfer_mode}" if settings.style is DisaggStyle.PARAMS else "rendezvous"
        return f"sim/{style}/{settings.block_size}x{settings.block_bytes}"

    @property
    def lends(self) -> bool:
        """True when a prefill engine can read blocks of a decode engine."""
        return self.settings.style is DisaggStyle.PARAMS and self.settings.transfer_mode == "pull"

    @property
    def layout(self) -> str:
        return f"{self.model} {self.terms}"

    def transfer_s(self, blocks: int, descriptors: int) -> float:
        """Return the time that this many blocks take over the link."""
        moving = self.timing.transfer_s(tokens=blocks * self.settings.block_size, descriptors=descriptors)
        return moving * self.settings.faults.slow_transfer

    def side(self, wanted: Handover, sequence: EngineSequence, chain: Sequence[int]) -> Side:
        """Work out the part that this sequence, with this chain, asks for. Raises RequestInvalid or UnsupportedByEngine."""
        if wanted.kind == "lend" and not (self.lends and self.role is Role.DECODE):
            raise UnsupportedByEngine("only an engine in the role decode, of the mode pull, lends its prefixes")
        if wanted.kind not in ("lend", self.role.value):
            raise UnsupportedByEngine(f"an engine in the role {self.role.value} takes no {wanted.kind} hand-overs")
        if self.settings.style is DisaggStyle.RENDEZVOUS:
            if wanted.room is None:
                raise RequestInvalid("a rendezvous needs a room", param="handover")
            if wanted.kind == "decode" and not wanted.peer:
                raise RequestInvalid("the decode side of a rendezvous needs its peer", param="handover")
            kind: Literal["prefill", "decode"] = "decode" if wanted.kind == "decode" else "prefill"
            return Side(kind, f"room {wanted.room}", room=True, peer=wanted.peer or "")
        if wanted.room is not None:
            raise UnsupportedByEngine("this simulator hands over by parameters, not in rooms (disagg)")
        prefilled = Side("prefill", sequence.id)
        if wanted.kind != "decode" and wanted.params is None:
            return prefilled
        offer = parse_offer(wanted.params)
        self._check(offer, sequence, chain)
        then = prefilled if wanted.kind == "prefill" else None
        return Side("decode", offer.request, offer=offer, peer=offer.engine, then=then)

    def _check(self, offer: KvOffer, sequence: EngineSequence, chain: Sequence[int]) -> None:
        if offer.layout != self.layout:
            raise RequestInvalid(f"the prefill engine has {offer.layout!r}, this one {self.layout!r}", param="handover")
        if offer.mode != self.settings.transfer_mode:
            raise RequestInvalid(f"the prefill engine transfers by {offer.mode}, this one does not", param="handover")
        if offer.mode == "push" and offer.request != sequence.id:
            raise RequestInvalid(
                f"to push, both sides need the same request id: {offer.request!r}, {sequence.id!r}", param="handover"
            )
        count = -(-offer.tokens // self.settings.block_size)
        if not 0 < offer.tokens <= len(sequence.token_ids) or len(offer.blocks) != count:
            raise RequestInvalid(f"{len(offer.blocks)} blocks for {offer.tokens} tokens of this prompt", param="handover")
        if offer.chain != list(chain[: len(offer.chain)]) or len(offer.chain) != offer.tokens // self.settings.block_size:
            raise RequestInvalid("these parameters belong to another prompt", param="handover")


def parse_offer(params: Mapping[str, Any] | None) -> KvOffer:
    """Read the parameters of a hand-over. Raises RequestInvalid for anything else."""
    try:
        return msgspec.convert(params, KvOffer)
    except msgspec.ValidationError as error:
        raise RequestInvalid(f"hand-over parameters: {error}", param="handover") from None


def segments(*blocks: Sequence[int]) -> int:
    """Count the descriptors for these blocks, taken pairwise: stretches in which all numbers go up by one."""
    rows = list(zip(*blocks, strict=True))
    breaks = sum(any(b != a + 1 for a, b in zip(one, two, strict=True)) for one, two in pairwise(rows))
    return breaks + bool(rows)
