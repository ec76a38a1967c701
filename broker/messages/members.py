"""Members: the values of leases."""

from __future__ import annotations

from headrace.broker.messages.base import Record


class WorkerMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of a worker's lease."""

    worker: str
    pool: str
    model: str
    role: str = "aggregated"
    engine: str = ""
    engine_version: str = ""
    slots: int = 0
    block_size: int = 0
    blocks: int = 0
    max_model_len: int = 0
    epoch: int = 0
    started: float = 0.0
    draining: bool = False
    host: str = ""
    pid: int = 0
    labels: list[str] = []
    adapters: list[str] = []  # adapters it serves besides the base model
    kv_events: bool = False  # it publishes its cache's changes; without them routers work from their own placements
    step_tokens: int = 0  # most tokens of one engine step, 0 = unknown
    roles: list[str] = []  # those it can change to
    handover: str = ""  # how it hands KV blocks over; workers with equal words can; empty = not at all
    transfer_card: bytes = b""  # what other engines need to reach its memory
    tool_parser: str | None = None  # what it takes answers apart with; the card has those of the worker that joined last
    reasoning_parser: str | None = None

    @property
    def serves(self) -> bool:
        """It owns requests; a worker in the role `prefill` only computes prompts for others."""
        return self.role != "prefill"


class IngressMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of an ingress's lease."""

    ingress: str
    started: float = 0.0
    host: str = ""
    pid: int = 0


class RouterMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of a router's lease."""

    router: str
    pool: str
    started: float = 0.0
