"""Shares what frontends count: sums go through counters of the server, open requests are told around."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.keys.usage_counters import OpenCounts, UsageCounters
from headrace.frontend.auth.quotas import Quotas
from headrace.frontend.auth.usage_window import UsageWindow
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

SHARE_S = 0.25
SILENT_S = 2.0  # what a frontend said of its open requests counts for so long
AT_ONCE = 64  # additions on their way
_REMIND_ROUNDS = 4  # open requests are told again, for frontends that were not there


class QuotaShare:
    """Keeps the quotas of one frontend in step with those of the others. Run it beside the server.

    A limit can be passed by what the other frontends admit within one round, `SHARE_S`; sums are exact after it.
    """

    def __init__(
        self,
        quotas: Quotas,
        messaging: Messaging,
        subjects: Subjects,
        *,
        me: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._quotas = quotas
        self._messaging = messaging
        self._subject = subjects.quota_open()
        self._counters = UsageCounters(messaging, subjects)
        self._me = me
        self._wall = wall
        self._others: dict[str, tuple[float, dict[str, int]]] = {}  # ingress → when it spoke, and its open requests
        self._told: dict[str, int] = {}
        self._quiet_rounds = 0
        self._warned = False

    async def run(self) -> None:
        """Share until cancelled."""
        subscription = await self._messaging.subscribe(self._subject, self._on_open)
        try:
            while True:
                await asyncio.sleep(SHARE_S)
                await self.round()
        finally:
            await subscription.unsubscribe()

    async def round(self) -> None:
        """Send what was counted, learn the sums, and tell and hear about open requests."""
        now = self._wall()
        self._tell()
        self._hear(now)
        due = [
            (meter.owner, kind, window, number, amount)
            for meter in self._quotas.meters()
            for kind, window in meter.windows()
            for number, amount in window.take(now)
        ]
        for at in range(0, len(due), AT_ONCE):
            async with asyncio.TaskGroup() as group:
                for each in due[at : at + AT_ONCE]:
                    group.create_task(self._add(*each))

    async def _add(self, owner: str, kind: str, window: UsageWindow, number: int, amount: int) -> None:
        try:
            total = await self._counters.add(owner, kind, number, amount)
        except JetStreamError as error:
            window.failed(number, amount)
            self._warn("quota.not_shared", error=str(error))
            return
        window.learn(number, total)
        if total is None:
            self._warn("quota.not_shared", error="the NATS server does not count: quotas hold per frontend (needs 2.12)")
        else:
            self._warned = False

    def _warn(self, event: str, **fields: str) -> None:
        if not self._warned:
            self._warned = True
            log.warning(event, **fields)

    def _tell(self) -> None:
        mine = {meter.owner: meter.open for meter in self._quotas.meters() if meter.limits.concurrent and meter.open}
        self._quiet_rounds += 1
        if mine == self._told and (not mine or self._quiet_rounds < _REMIND_ROUNDS):
            return
        self._told, self._quiet_rounds = mine, 0
        self._messaging.send(self._subject, encode(OpenCounts(ingress=self._me, open=mine)))

    def _hear(self, now: float) -> None:
        sums: dict[str, int] = {}
        for ingress, (at, counts) in list(self._others.items()):
            if now - at > SILENT_S:
                del self._others[ingress]
                continue
            for owner, count in counts.items():
                sums[owner] = sums.get(owner, 0) + count
        self._quotas.hear(sums)

    def _on_open(self, message: Message) -> None:
        try:
            counts = decode(OpenCounts, message.data)
        except WireError as error:
            log.warning("quota.unreadable", error=str(error))
            return
        if counts.ingress != self._me:
            self._others[counts.ingress] = self._wall(), {o: n for o, n in counts.open.items() if n > 0}
            self._hear(self._wall())
