"""The requests a router holds un-acked: those that the server believes to be delivered to it, and until when it does.

The claims on them are extended together, every third of the server's `ack_wait`.  When that could not be done in time (the
process was frozen, the connection gone), the server has given the requests to another consumer: then they are let go without
an ack or nak, because that would speak about the other consumer's delivery.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

from headrace.jetstream.ports import Delivery
from headrace.jetstream.subjects import MOVED_CLASSES, RequestClass
from headrace.router.session import metrics
from headrace.router.session.held_request import HeldRequest, RequestState


class RequestWindow:
    """All requests that one router holds, by stored message and by id."""

    def __init__(self, pool: str, *, ack_wait_s: float) -> None:
        self.pool = pool
        self._ack_wait_s = ack_wait_s
        self._by_key: dict[tuple[bool, int], HeldRequest] = {}
        self._by_id: dict[str, HeldRequest] = {}
        self.counts: dict[str, int] = {}  # requests held, by class
        self._loop = asyncio.get_running_loop()
        self._extended_s = self._loop.time()
        self._gauges: dict[tuple[str, str], Any] = {}  # finding a labelled metric costs more than setting it
        self._bytes_gauge = metrics.WINDOW_BYTES.labels(pool)
        self.bytes = 0

    def _gauge(self, request_class: str, tenant: str) -> Any:
        gauge = self._gauges.get((request_class, tenant))
        if gauge is None:
            gauge = self._gauges[request_class, tenant] = metrics.WINDOW.labels(self.pool, request_class, tenant)
        return gauge

    def __len__(self) -> int:
        return len(self._by_key)

    def __iter__(self) -> Iterator[HeldRequest]:
        return iter(list(self._by_key.values()))

    def of(self, request_id: str) -> HeldRequest | None:
        """Return the held request of this id. There is at most one at a time."""
        return self._by_id.get(request_id)

    def knows(self, delivery: Delivery, request_class: RequestClass) -> bool:
        """Return whether a request is held under this sequence."""
        return (request_class in MOVED_CLASSES, delivery.stream_seq) in self._by_key

    def displaced(self, delivery: Delivery, request_class: RequestClass) -> HeldRequest | None:
        """Return the request held under this sequence if it is of another message: the stream was deleted and made again."""
        held = self._by_key.get((request_class in MOVED_CLASSES, delivery.stream_seq))
        return held if held is not None and held.delivery.data != delivery.data else None

    def redelivered(self, delivery: Delivery, request_class: RequestClass) -> bool:
        """Replace the ack handle if this stored message is held already. Return whether it was."""
        held = self._by_key.get((request_class in MOVED_CLASSES, delivery.stream_seq))
        if held is None:
            return False
        held.delivery = delivery
        return True

    def add(self, held: HeldRequest) -> None:
        """Hold one more request. Raises KeyError if another one of this id is held."""
        head = held.head
        if head.id in self._by_id:
            raise KeyError(head.id)
        held.size = len(held.delivery.data)
        held.gauge = self._gauge(held.request_class, metrics.tenant_label(head.tenant))
        self._by_key[held.key] = held
        self._by_id[head.id] = held
        self.counts[held.request_class] = self.counts.get(held.request_class, 0) + 1
        self.bytes += held.size
        held.gauge.inc()
        self._bytes_gauge.set(self.bytes)

    def remove(self, held: HeldRequest) -> bool:
        """Hold this request no longer. Return False if it was removed before."""
        if held.state is RequestState.GONE:
            return False
        held.leave()
        self._by_key.pop(held.key, None)
        self._by_id.pop(held.head.id, None)
        self.counts[held.request_class] -= 1
        self.bytes -= held.size
        held.gauge.dec()
        self._bytes_gauge.set(self.bytes)
        return True

    def oldest_s(self, wall_s: float) -> float:
        """Return how long ago the oldest held request was created; 0 without one. Looks at all of them. `wall_s`: Unix time."""
        return max(0.0, wall_s - min((held.head.created for held in self._by_key.values()), default=wall_s))

    # Claims: for how long the server believes that the requests are being worked on here.

    @property
    def claims_valid(self) -> bool:
        """The server still believes that all held requests are being worked on here."""
        return self._loop.time() - self._extended_s < self._ack_wait_s

    def extend(self) -> None:
        """Tell the server that every request is being worked on. Call it only while connected: otherwise nothing is sent."""
        for held in self._by_key.values():
            held.delivery.progress()
        self._extended_s = self._loop.time()

    def restart_claims(self) -> None:
        """Count claims from now on, because no older request is held."""
        self._extended_s = self._loop.time()
