"""The requests a router holds un-acked: what the server believes to be delivered to it, and for how long it still does.

The claims on them are extended together, every third of the server's `ack_wait`.  When that could not be done in time (the
process was frozen, the connection gone) the server has given them to somebody else: then they are let go without a word, for
an ack or nak would speak about another's delivery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from headrace.broker.codec import decode
from headrace.broker.messages import HistoryEntry, Record
from headrace.jetstream.ports import Delivery
from headrace.jetstream.subjects import RequestClass
from headrace.router.session import metrics

State = Literal["waiting", "placing", "refusing", "gone"]


class RequestHead(Record, frozen=True, omit_defaults=True, kw_only=True):
    """An `Envelope` without the payload, which a router has no use for and must not copy."""

    id: str
    judge: str
    deadline: float
    created: float = 0.0
    tokens: int
    max_tokens: int = 0
    choices: int = 1
    request_class: str = "std"
    tenant: str = "_"
    priority: int = 0
    block_size: int = 0
    hashes: bytes = b""
    adapter: str = ""
    session: str = ""
    affinity: Literal["soft", "hard"] = "soft"
    worker: str = ""
    require: list[str] = []
    prefer: dict[str, float] = {}


@dataclass(eq=False, slots=True)
class HeldRequest:
    """One request in this router's hands. `delivery` is the newest handle for acks."""

    delivery: Delivery
    head: RequestHead
    attempt: int
    history: list[HistoryEntry]
    request_class: RequestClass
    state: State = "waiting"
    size: int = 0
    gauge: Any = field(default=None, repr=False)

    @property
    def id(self) -> str:
        return self.head.id

    @property
    def key(self) -> tuple[bool, int]:
        """The stored message: moved requests lie in a stream of their own."""
        return self.request_class == "re", self.delivery.stream_seq


class RequestWindow:
    """All requests held, by stored message and by id."""

    def __init__(self, pool: str, *, ack_wait_s: float) -> None:
        self._pool = pool
        self._ack_wait_s = ack_wait_s
        self._by_key: dict[tuple[bool, int], HeldRequest] = {}
        self._by_id: dict[str, HeldRequest] = {}
        self._per_class: dict[str, int] = {}
        self._loop = asyncio.get_running_loop()
        self._extended_s = self._loop.time()
        self._gauges: dict[tuple[str, str], Any] = {}  # finding a labelled metric costs more than setting it
        self._bytes_gauge = metrics.WINDOW_BYTES.labels(pool)
        self.bytes = 0

    def _gauge(self, request_class: str, tenant: str) -> Any:
        gauge = self._gauges.get((request_class, tenant))
        if gauge is None:
            gauge = self._gauges[request_class, tenant] = metrics.WINDOW.labels(self._pool, request_class, tenant)
        return gauge

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(list(self._by_key.values()))

    def of(self, request_id: str) -> HeldRequest | None:
        """The request of this id that is held, of which there is one at a time."""
        return self._by_id.get(request_id)

    def displaced(self, delivery: Delivery, request_class: RequestClass) -> HeldRequest | None:
        """What is held under this sequence, if it is quite another message: the stream was deleted and made again."""
        held = self._by_key.get((request_class == "re", delivery.stream_seq))
        return held if held is not None and held.delivery.data != delivery.data else None

    def redelivered(self, delivery: Delivery, request_class: RequestClass) -> bool:
        """True when this stored message is held already: only its ack handle is new."""
        held = self._by_key.get((request_class == "re", delivery.stream_seq))
        if held is None:
            return False
        held.delivery = delivery
        return True

    def add(self, held: HeldRequest) -> None:
        """Raises KeyError when a request of this id is held."""
        if held.id in self._by_id:
            raise KeyError(held.id)
        head = held.head
        held.size = len(held.delivery.data)
        held.gauge = self._gauge(held.request_class, metrics.tenant_label(head.tenant))
        self._by_key[held.key] = held
        self._by_id[held.id] = held
        self._per_class[held.request_class] = self.count(held.request_class) + 1
        self.bytes += held.size
        held.gauge.inc()
        self._bytes_gauge.set(self.bytes)

    def remove(self, held: HeldRequest) -> bool:
        """False when it was removed before."""
        if held.state == "gone":
            return False
        held.state = "gone"
        self._by_key.pop(held.key, None)
        self._by_id.pop(held.id, None)
        self._per_class[held.request_class] -= 1
        self.bytes -= held.size
        held.gauge.dec()
        self._bytes_gauge.set(self.bytes)
        return True

    def count(self, request_class: str) -> int:
        return self._per_class.get(request_class, 0)

    # -- claims ----------------------------------------------------------------------------------------------

    @property
    def ours(self) -> bool:
        """Whether the server still believes that all of this is being worked on here."""
        return self._loop.time() - self._extended_s < self._ack_wait_s

    def extend(self) -> None:
        """Say for every request that it is being worked on. Only while connected, or it is said to nobody."""
        for held in self._by_key.values():
            held.delivery.progress()
        self._extended_s = self._loop.time()

    def anew(self) -> None:
        """Nothing older is held: claims count from now."""
        self._extended_s = self._loop.time()


def decode_head(data: bytes) -> RequestHead:
    """Raises WireError."""
    return decode(RequestHead, data)
