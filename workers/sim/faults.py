"""Faults that the simulator can be told to have, in each shape real engines have shown.

Token numbers count the answer from 0, emitted tokens of earlier runs included: a sequence that resumes at or behind the number
has the fault at once, again, as a poisonous request would.  `fresh_only` limits a fault to sequences that start at token 0.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from headrace.workers.errors import EngineDead, EngineOverloaded, RequestInvalid, UnsupportedByEngine

TokenNumber = Annotated[int, msgspec.Meta(ge=0)]
Every = Annotated[int, msgspec.Meta(ge=1)] | None


class SequenceFaults(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults of single sequences; a request may bring its own where the engine's settings allow that."""

    reject: Literal["overloaded", "invalid", "unsupported", "dead"] | None = None  # `submit` raises
    stuck_at_token: TokenNumber | None = None  # keeps its slot and blocks and emits nothing more
    crash_at_token: TokenNumber | None = None  # the process kills itself (SIGKILL) instead of producing this token
    die_at_token: TokenNumber | None = (
        None  # the engine dies instead, the process lives, and this sequence is named as the cause
    )
    fault_at_token: TokenNumber | None = None  # an output with `fault` instead of this token
    fault_code: str = "injected"
    fault_retriable: bool = True
    peer_dead: bool = False  # a decode sequence does not reach the engine that has its blocks
    transfer_breaks: bool = False  # a decode sequence loses that engine at the end of the transfer
    stall_transfer: bool = False  # the transfer never ends, on whichever side the sequence is
    fresh_only: bool = False

    def next_at(self, start: int) -> int | None:
        """Return the first token number, from `start` on, that one of these faults replaces."""
        if self.fresh_only and start > 0:
            return None
        numbers = [
            n for n in (self.stuck_at_token, self.crash_at_token, self.die_at_token, self.fault_at_token) if n is not None
        ]
        return max(min(numbers), start) if numbers else None


class Faults(SequenceFaults, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Faults of the engine: those of every sequence, and its own."""

    slow: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # factor on the duration of every step
    slow_transfer: Annotated[float, msgspec.Meta(gt=0)] = 1.0  # factor on the duration of every transfer between engines
    kv_drop_every: Every = None  # every n-th batch of KV events is lost
    kv_reorder_every: Every = None  # every n-th batch of KV events comes after the next one
    silent_from_step: Annotated[int, msgspec.Meta(ge=0)] | None = None  # from this step on sequences get nothing
    die_at_step: Annotated[int, msgspec.Meta(ge=0)] | None = None  # the engine is dead from this step on, the process lives


def raise_rejection(faults: SequenceFaults, start: int) -> None:
    """Raise what `reject` asks for, if anything, for a sequence that starts at token `start`."""
    if faults.reject is None or (faults.fresh_only and start > 0):
        return
    errors = {
        "overloaded": EngineOverloaded,
        "invalid": RequestInvalid,
        "unsupported": UnsupportedByEngine,
        "dead": EngineDead,
    }
    raise errors[faults.reject](f"injected fault: {faults.reject}")
