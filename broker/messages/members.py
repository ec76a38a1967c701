"""Defines the values of the leases of workers, ingresses and routers."""

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
    machine: str = ""  # where its process id is valid: boot and namespace of process ids; empty = unknown
    labels: list[str] = []
    adapters: list[str] = []  # adapters that it serves besides the base model
    kv_events: bool = False  # it publishes KV cache events; without them routers predict from their own placements
    step_tokens: int = 0  # most tokens of an engine step, 0 = unknown
    roles: list[str] = []  # roles that it can change to
    handover: str = ""  # KV transfer method; workers with the same one can transfer blocks; empty = none
    ranks: int = 1  # data-parallel ranks of its engine, each with a KV cache and a queue of its own
    transfer_card: bytes = b""  # data that other engines need to reach its memory
    tool_parser: str | None = None  # parser of its answers; the card names the parsers of the worker that joined last
    reasoning_parser: str | None = None
    sleeping: int = 0  # level of its sleep, with `draining`; 0 = awake. It can be woken
    waking: bool = False  # it is about to take requests again
    paused: bool = False  # it stands still, with `draining`, until it is resumed

    @property
    def serves(self) -> bool:
        """True if it owns requests; a worker in the role `prefill` only prefills prompts for other workers."""
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
    wakes: bool = False  # it wakes sleeping workers for requests that no other worker can take
