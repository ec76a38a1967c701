"""`headrace.jetstream.ports.PullLoop` and `Delivery` over the simulated server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import StoredMessage
from tests.simulation.virtual.consumers import Pull, SimConsumer

if TYPE_CHECKING:
    from tests.simulation.virtual.messaging import SimMessaging

WATCHDOG_S = 1.0  # a pull that says nothing for this long after its end is given up
RETRY_S = 0.25  # before asking again when the consumer does not answer


class SimDelivery:
    """One delivery. Every ack may be lost, and none raises."""

    __slots__ = ("_consumer", "_message", "_messaging", "_stream", "num_delivered", "pending")

    def __init__(
        self, messaging: SimMessaging, stream: str, consumer: str, message: StoredMessage, *, num_delivered: int, pending: int
    ) -> None:
        self._messaging = messaging
        self._stream = stream
        self._consumer = consumer
        self._message = message
        self.num_delivered = num_delivered
        self.pending = pending

    @property
    def subject(self) -> str:
        return self._message.subject

    @property
    def data(self) -> bytes:
        return self._message.data

    @property
    def headers(self) -> Mapping[str, str]:
        return self._message.headers or {}

    @property
    def stream_seq(self) -> int:
        return self._message.seq

    @property
    def stored(self) -> float:
        return self._message.at

    def ack(self) -> None:
        self._tell("ack", lambda consumer: consumer.ack(self._message.seq))

    def nak(self, delay_s: float = 0.0) -> None:
        self._tell("nak", lambda consumer: consumer.nak(self._message.seq, delay_s))

    def progress(self) -> None:
        self._tell("progress", lambda consumer: consumer.progress(self._message.seq))

    def term(self, reason: str = "") -> None:
        self._tell(f"term {reason}", lambda consumer: consumer.ack(self._message.seq))

    def _tell(self, what: str, function: Callable[[SimConsumer], None]) -> None:
        messaging = self._messaging
        if messaging.connected:
            name = f"{what} {self._stream} #{self._message.seq}"
            messaging.network.up(messaging.conn, self._stream, name, self._at_server, function)

    def _at_server(self, function: Callable[[SimConsumer], None]) -> None:
        consumer = self._messaging.server.consumer(self._stream, self._consumer)
        if consumer is not None:
            function(consumer)


@dataclass(eq=False, slots=True)
class Request:
    """A pull request as the client sees it."""

    left: int
    epoch: int
    pull: Pull
    timer: asyncio.TimerHandle


class SimPullLoop:
    """Keeps as much asked for as there is credit."""

    def __init__(
        self,
        messaging: SimMessaging,
        stream: str,
        consumer: str,
        on_delivery: Callable[[SimDelivery], None],
        *,
        credit: int,
        priority: int | None,
        expires_s: float,
        on_missing: Callable[[], Awaitable[None]] | None,
    ) -> None:
        self._messaging = messaging
        self._stream = stream
        self._consumer = consumer
        self._on_delivery = on_delivery
        self._credit = max(0, credit)
        self._on_missing = on_missing
        self._priority = priority or 0
        self._expires_s = expires_s
        self._requests: list[Request] = []
        self._running = False
        self._stopped = False
        self._consumer_missing = False
        self._wake = asyncio.Event()

    @property
    def credit(self) -> int:
        return self._credit

    def add_credit(self, n: int = 1) -> None:
        self._credit = max(0, self._credit + n)
        if sum(request.left for request in self._requests) > self._credit:
            self._withdraw()
        self._ask()

    async def run(self) -> None:
        if self._stopped:
            return
        conn = self._messaging.conn
        self._running = True
        conn.on_up.append(self._reconnected)
        try:
            self._ask()
            while not self._stopped:
                await self._wake.wait()
                self._wake.clear()
                if self._consumer_missing and self._on_missing is not None:
                    await self._recover(self._on_missing)
        finally:
            self._running = False
            conn.on_up.remove(self._reconnected)
            self._withdraw()

    async def _recover(self, on_missing: Callable[[], Awaitable[None]]) -> None:
        self._consumer_missing = False
        try:
            await on_missing()
        except JetStreamError as error:
            self._messaging.world.log(self._messaging.conn.id, "consumer not made again:", repr(error))

    async def stop(self) -> None:
        self._stopped = True
        self._running = False
        self._credit = 0
        self._withdraw()
        self._wake.set()

    def _reconnected(self) -> None:
        for request in self._requests:
            request.timer.cancel()
        self._requests.clear()
        self._ask()

    def _ask(self) -> None:
        messaging, conn = self._messaging, self._messaging.conn
        wanted = self._credit - sum(request.left for request in self._requests)
        if not self._running or wanted <= 0 or not messaging.connected:
            return
        pull = Pull(conn, wanted, self._priority, lambda *a: self._delivered(request, *a), lambda: self._over(request))
        timer = messaging.loop.call_later(self._expires_s + WATCHDOG_S, lambda: self._over(request))
        request = Request(wanted, conn.epoch, pull, timer)
        self._requests.append(request)
        messaging.network.up(conn, self._stream, f"pull {self._consumer} {wanted}", self._at_server, request)

    def _at_server(self, request: Request) -> None:
        messaging = self._messaging
        consumer = messaging.server.consumer(self._stream, self._consumer)
        if consumer is not None:
            consumer.pull(request.pull, self._expires_s)
        else:
            messaging.network.down(messaging.conn, self._stream, "no consumer", self._missing, request)

    def _missing(self, request: Request) -> None:
        if request in self._requests:
            request.timer.cancel()
            request.timer = self._messaging.loop.call_later(RETRY_S, lambda: self._over(request))
            self._consumer_missing = True
            self._wake.set()

    def _delivered(self, request: Request, _left: int, message: StoredMessage, num_delivered: int, pending: int) -> None:
        delivery = SimDelivery(
            self._messaging, self._stream, self._consumer, message, num_delivered=num_delivered, pending=pending
        )
        if not self._running or request not in self._requests or self._credit <= 0:
            delivery.nak()
            return
        self._credit -= 1
        request.left -= 1
        if request.left <= 0:
            self._close(request)
        self._on_delivery(delivery)
        self._ask()

    def _over(self, request: Request) -> None:
        if request in self._requests:
            self._close(request)
            self._ask()

    def _close(self, request: Request) -> None:
        request.timer.cancel()
        self._requests.remove(request)

    def _withdraw(self) -> None:
        messaging = self._messaging
        for request in list(self._requests):
            self._close(request)
            if messaging.connected and request.epoch == messaging.conn.epoch:
                what = f"withdraw {self._consumer}"
                messaging.network.up(messaging.conn, self._stream, what, self._withdraw_at_server, request, sure=True)

    def _withdraw_at_server(self, request: Request) -> None:
        consumer = self._messaging.server.consumer(self._stream, self._consumer)
        if consumer is not None:
            consumer.withdraw(request.pull)
