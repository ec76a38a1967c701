"""The part of a sequence in a hand-over, and the parameters that a prefill side offers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec


class KvOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a params-style hand-over, opaque to all but the decode side. Times are Unix seconds."""

    engine: str
    request: str
    number: int  # sequence number among this engine's offers
    blocks: list[int]
    tokens: int
    chain: list[int]  # chain values of the whole blocks; they identify the prompt
    layout: str  # engines whose layouts differ cannot read each other
    mode: Literal["pull", "push"]
    cached_tokens: int
    issued_at: float
    ttl_s: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class Side:
    """A sequence's part in a hand-over. `key` names the hand-over on both sides; `peer` is where a decode side fetches.

    A prefill side that reads a lent prefix is a decode side until it has come, and `then` what it is afterwards.
    """

    kind: Literal["prefill", "decode"]
    key: str
    room: bool = False
    offer: KvOffer | None = None
    peer: str = ""
    then: Side | None = None

    @property
    def number(self) -> int:
        """The offer's number, 0 without an offer."""
        return self.offer.number if self.offer is not None else 0

    @property
    def pulls(self) -> bool:
        """True for a decode side that reads the blocks itself."""
        return self.offer is not None and self.offer.mode == "pull"
