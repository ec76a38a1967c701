"""Prompts that other workers compute for this one: from the decision to the first token, or back to computing it here.

One task per run.  Nothing has been emitted before the first token, so whatever fails on the way costs time and nothing else:
another try where another prefill worker may do better, then this engine's own prefill.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import structlog

from headrace.broker.codec import pack_u32
from headrace.broker.messages import PrefillDecision, WorkerMember
from headrace.broker.messages.prefill import PrefillDone, PrefillJob
from headrace.broker.prefill.client import PrefillClient
from headrace.broker.prefill.errors import ANOTHER_TRY, PrefillFailed
from headrace.workers import metrics
from headrace.workers.engine import DisaggStyle, EngineInfo, Fault, Handover
from headrace.workers.runtime.choice import ChoiceRun

log = structlog.get_logger()

TRIES = 2
LEAST_LEFT_S = (
    2.0  # blocks that are kept for less than this are not fetched: the engine renews its lease only once it has begun
)


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverSettings:
    """Durations in seconds."""

    wait_s: float = 2.0  # for somebody to take the job, at least; the router may say longer
    transfer_s: float = 10.0  # from the hand-over to the first token


def pick(able: list[WorkerMember], peers: list[WorkerMember], rng: random.Random) -> str:
    """The prefill worker to ask by name where not all can do it, since some lack the adapter; empty: any of them will do."""
    return "" if len(able) in (0, len(peers)) else rng.choice(able).worker


class Engines(Protocol):
    """What the runtime does for a hand-over."""

    def hand_over(self, choice: ChoiceRun, handover: Handover) -> asyncio.Future[Fault | None]:
        """Give it to the engine; resolved by its first token (None), or by the fault `transfer_failed`."""

    def take_back(self, choice: ChoiceRun, params: Mapping[str, Any] | None) -> None:
        """Abort it in the engine, and let go of what `params` name."""

    def begin_here(self, choice: ChoiceRun) -> None:
        """Have this engine compute its prompt."""


@dataclass(slots=True)
class Handed:
    """The last hand-over that went well, for load reports."""

    took_s: float = 0.0
    tokens: int = 0


class RemotePrefill:
    """The remote prefill of one run: its first open choice is handed over, the others find its blocks in the cache."""

    def __init__(
        self,
        choices: list[ChoiceRun],
        decision: PrefillDecision,
        payload: bytes,
        *,
        client: PrefillClient,
        engines: Engines,
        info: EngineInfo,
        style: DisaggStyle,
        worker: str,
        settings: HandoverSettings,
        last: Handed,
        rng: random.Random,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.waiting = list(choices)  # not in the engine yet
        self._choice = choices[0]
        self._decision = decision
        self._payload = payload
        self._client = client
        self._engines = engines
        self._info = info
        self._style = style
        self._worker = worker
        self._settings = settings
        self._last = last
        self._rng = rng
        self._wall = wall
        self._job = ""
        self._params: Mapping[str, Any] | None = None

    async def run(self) -> None:
        """Until the first token is there, or the prompt is computed here."""
        try:
            if not await self._remote():
                self._choice.renew("local")
                self.waiting.remove(self._choice)
                self._engines.begin_here(self._choice)
        finally:
            self._client.settle(self._job)
        for choice in list(self.waiting):
            self.waiting.remove(choice)
            self._engines.begin_here(choice)

    async def _remote(self) -> bool:
        directed = self._decision.worker
        failed: set[str] = set()
        for attempt in range(TRIES):
            self._job = self._choice.renew(str(attempt) if attempt else "")
            try:
                await self._try(directed)
            except PrefillFailed as error:
                metrics.PREFILL_FAILURES.labels(error.reason).inc()
                log.warning("prefill.failed", job=self._job, reason=error.reason, why=str(error), attempt=attempt + 1)
                failed |= {error.worker, self._client.settle(self._job)}
                others = [peer for peer in self._able() if peer.worker not in failed]
                if error.reason not in ANOTHER_TRY or not others:
                    return False
                peers = self._client.peers(self._info.handover)
                directed = pick(others, peers, self._rng) if self._choice.run.envelope.adapter else ""
            else:
                return True
        return False

    def _able(self) -> list[WorkerMember]:
        return self._client.peers(self._info.handover, self._choice.run.envelope.adapter)

    async def _try(self, directed: str) -> None:
        """Raises PrefillFailed."""
        job = self._make_job()
        began_s = self._wall()
        await self._client.publish(job, directed=directed)
        taken = await self._client.taken(job.job, wait_s=max(self._decision.wait_s, self._settings.wait_s))
        if self._style is DisaggStyle.RENDEZVOUS:
            self._choice.computed_elsewhere = job.uncached  # until it says so itself, perhaps after the first token
            came = self._hand_over(Handover(kind="decode", room=job.room, peer=taken.address))
            done = await self._meet(came)
        else:
            done = await self._client.done(job.job)
            await self._client.confirm(job.job, least_s=LEAST_LEFT_S)
            self._params = done.params
            came = self._hand_over(Handover(kind="decode", params=done.params))
        self._choice.computed_elsewhere, self._choice.cached_elsewhere = done.computed, done.cached
        handed_s = self._wall()
        await self._first_token(came)
        self._observe(done, began_s, handed_s)

    def _make_job(self) -> PrefillJob:
        choice = self._choice
        envelope = choice.run.envelope
        emitted = choice.run.choices[choice.choice].ids
        return PrefillJob(
            job=self._job,
            id=choice.run.id,
            attempt=choice.run.attempt,
            decode=self._worker,
            deadline=envelope.deadline,
            created=self._wall(),
            tokens=choice.tokens,
            uncached=choice.uncached,
            priority=envelope.priority,
            room=secrets.randbits(62) if self._style is DisaggStyle.RENDEZVOUS else None,
            emitted=pack_u32(emitted),
            block_size=envelope.block_size,
            hashes=envelope.hashes,
            payload=b"" if envelope.spill is not None else self._payload,
            spill=envelope.spill,
        )

    def _hand_over(self, handover: Handover) -> asyncio.Future[Fault | None]:
        if self._choice in self.waiting:
            self.waiting.remove(self._choice)
        return self._engines.hand_over(self._choice, handover)

    async def _meet(self, came: asyncio.Future[Fault | None]) -> PrefillDone:
        """Both sides are at it: until the prefill side says that its part is over, or this engine that it will not come."""
        done = asyncio.ensure_future(self._client.done(self._job))
        try:
            both: list[asyncio.Future[Any]] = [done, came]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not done.done() and came.done() and came.result() is None:
                await asyncio.wait([done])  # the token was faster than the message
            if done.done():
                return done.result()
        except PrefillFailed:
            if came.done() and came.result() is None:  # it is lost, but it had done its work
                return PrefillDone(job=self._job, worker="", computed=self._choice.uncached)
            self._take_back()
            raise
        finally:
            done.cancel()
        raise self._transfer_failed(came.result())

    async def _first_token(self, came: asyncio.Future[Fault | None]) -> None:
        await asyncio.wait([came], timeout=self._settings.transfer_s)
        if not came.done():
            self._take_back()
            message = f"no first token within {self._settings.transfer_s:g} s after the hand-over"
            raise PrefillFailed("transfer_timeout", message)
        if came.result() is not None:
            raise self._transfer_failed(came.result())

    def _transfer_failed(self, fault: Fault | None) -> PrefillFailed:
        self.waiting.insert(0, self._choice)  # the engine has dropped it
        return PrefillFailed("transfer_failed", fault.message if fault is not None else "the engine did not say why")

    def _take_back(self) -> None:
        self._engines.take_back(self._choice, self._params)
        self.waiting.insert(0, self._choice)

    def _observe(self, done: PrefillDone, began_s: float, handed_s: float) -> None:
        now = self._wall()
        choice = self._choice
        fetched = max(0, len(choice.prompt) + choice.run.choices[choice.choice].start - choice.cached_tokens)
        metrics.HANDOVER_S.labels("queue").observe(done.queued_s)
        metrics.HANDOVER_S.labels("prefill").observe(done.took_s)
        metrics.HANDOVER_TOKENS.inc(fetched)
        if self._style is DisaggStyle.PARAMS:  # in a rendezvous the transfer goes on beside the prefill
            metrics.HANDOVER_S.labels("transfer").observe(now - handed_s)
            self._last.took_s, self._last.tokens = now - handed_s, fetched
        log.debug(
            "prefill.handed_over",
            job=self._job,
            by=done.worker,
            took_s=round(now - began_s, 4),
            queue_s=round(done.queued_s, 4),
            prefill_s=round(done.took_s, 4),
            transfer_s=round(now - handed_s, 4),
            tokens=fetched,
        )
