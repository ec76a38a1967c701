"""Defines a job, as it is submitted to an ingress, and builds its message."""

from __future__ import annotations

import time
from os import urandom
from typing import Literal

import msgspec

from headrace.broker.codec import encode
from headrace.broker.errors import WireError
from headrace.broker.messages import Envelope, Generation, Pooling, Spill
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.subjects import RequestClass

NOTHING = Generation(token_ids=b"")


def new_id() -> str:
    """Return a new request id: sortable by second, safe in subjects, with 72 random bits."""
    return f"{int(time.time()):08x}{urandom(9).hex()}"


class Job(msgspec.Struct, frozen=True, kw_only=True):
    """A request, ready to be queued. `hashes` is the prompt's block chain as little-endian u64, empty for no affinity.

    A job with `pooling` is of kind `pool`; its `generation` is ignored, and each input counts as a choice.
    """

    id: str
    card: ModelCard
    generation: Generation = NOTHING
    pooling: Pooling | None = None
    prompt_tokens: int
    max_tokens: int = 0
    hashes: bytes = b""
    choices: int = 1
    request_class: RequestClass = "std"
    tenant: str = "_"
    priority: int = 0
    deadline_s: float = 600.0  # from now
    adapter: str = ""
    session: str = ""
    affinity: Literal["soft", "hard"] = "soft"
    worker: str = ""  # the only worker that may run it
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    agent_priority: int | None = None
    require: list[str] = []
    prefer: dict[str, float] = {}
    name: str = ""  # the client's own name for the request
    trace: dict[str, str] = {}  # W3C headers, for those who compute it
    explain: bool = False  # the ingress remembers which router placed it (`Ingress.explain`)

    def payload(self) -> bytes:
        """Encode the generation or, for kind `pool`, the pooling. Raises WireError for what clients may send in JSON alone."""
        try:
            return encode(self.generation if self.pooling is None else self.pooling)
        except OverflowError:
            raise WireError("an integer in the request does not fit into 64 bits") from None

    def envelope(self, *, judge: str, now: float, payload: bytes, spill: Spill | None) -> Envelope:
        """Return the message body; `now` is Unix time. Exactly one of `payload` and `spill` carries the generation."""
        return Envelope(
            id=self.id,
            pool=self.card.pool,
            model=self.card.model,
            judge=judge,
            deadline=now + self.deadline_s,
            created=now,
            kind="generate" if self.pooling is None else "pool",
            tokens=self.prompt_tokens,
            max_tokens=self.max_tokens,
            choices=self.choices,
            request_class=self.request_class,
            tenant=self.tenant,
            priority=self.priority,
            block_size=self.card.block_size if self.hashes else 0,
            hashes=self.hashes,
            payload=payload,
            spill=spill,
            name=self.name,
            adapter=self.adapter,
            session=self.session,
            affinity=self.affinity,
            worker=self.worker,
            ttft_target_s=self.ttft_target_s,
            itl_target_s=self.itl_target_s,
            agent_priority=self.agent_priority,
            require=self.require,
            prefer=self.prefer,
            trace=self.trace,
        )
