"""Defines the values of the leases of workers, ingresses and routers."""

from __future__ import annotations

from headrace.broker.messages.requests import Count, Name, Ranks, Record, Run64, Seconds, Token, Tokens, UnixTime

HELPERS = frozenset({"prefill", "encode"})
"""Workers in these roles own no requests: they compute prompts, or encode media, for those that do."""


class WorkerMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of a worker's lease."""

    worker: Token
    pool: Token
    model: str
    role: str = "aggregated"
    engine: str = ""
    engine_version: str = ""
    slots: Tokens = 0
    block_size: Tokens = 0
    blocks: Count = 0
    max_model_len: Count = 0
    epoch: Run64 = 0
    started: UnixTime = 0.0
    start_s: Seconds = 0.0  # from the start of its process until it could serve, 0 = unknown
    draining: bool = False
    host: str = ""
    pid: Count = 0
    machine: str = ""  # where its process id is valid: boot and namespace of process ids; empty = unknown
    labels: list[str] = []
    zone: Name = ""  # where its machine is; empty = unknown
    adapters: list[str] = []  # adapters that it serves besides the base model
    kv_events: bool = False  # it publishes KV cache events; without them routers predict from their own placements
    step_tokens: Count = 0  # most tokens of an engine step, 0 = unknown
    fleet: Name = ""  # the workers of the pool that are like it: engine, hardware, context length, price
    price: Seconds = 0.0  # of this worker for an hour, in a unit that all fleets of the pool share
    roles: list[str] = []  # roles that it can change to
    handover: str = ""  # KV transfer method; workers with the same one can transfer blocks; empty = none
    ranks: Ranks = 1  # data-parallel ranks of its engine, each with a KV cache and a queue of its own
    encoder: str = ""  # workers with the same one make the same embeddings of media, and pass them on; empty = none are passed
    transfer_card: bytes = b""  # data that other engines need to reach its memory
    tool_parser: str | None = None  # parser of its answers; the card names the parsers of the worker that joined last
    reasoning_parser: str | None = None
    sleeping: int = 0  # level of its sleep, with `draining`; 0 = awake. It can be woken
    waking: bool = False  # it is about to take requests again
    paused: bool = False  # it stands still, with `draining`, until it is resumed

    @property
    def serves(self) -> bool:
        """True if it owns requests; workers in the roles `prefill` and `encode` compute parts of them for other workers."""
        return self.role not in HELPERS


class IngressMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of an ingress's lease."""

    ingress: Token
    started: UnixTime = 0.0
    host: str = ""
    pid: Count = 0


class RouterMember(Record, frozen=True, omit_defaults=True, kw_only=True):
    """The value of a router's lease."""

    router: Token
    pool: Token
    started: UnixTime = 0.0
    host: str = ""
    pid: Count = 0
    wakes: bool = False  # it wakes sleeping workers for requests that no other worker can take
