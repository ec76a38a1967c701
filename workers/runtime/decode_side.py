"""Runs the decode side of hand-overs: has a prefill worker compute a prompt, and falls back to this engine's own prefill.

Each run has a task. No token has been emitted before the first one, so a failure costs only time: another try if another
prefill worker may do better, then this engine's own prefill.
"""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import structlog

from headrace.broker.codec import log_ids, pack_u32
from headrace.broker.messages.members import WorkerMember
from headrace.broker.messages.prefill import PrefillDone, PrefillJob
from headrace.broker.messages.requests import PrefillDecision
from headrace.broker.prefill_client import ANOTHER_TRY, PrefillClient, PrefillFailed
from headrace.workers import metrics
from headrace.workers.engine import DisaggStyle, EngineInfo, Fault, Handover
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.prefill_side import PrefixLender
from headrace.workers.runtime.sequences import Sequences

log = structlog.get_logger()

TRIES = 2
# Blocks that are kept for less than this are not fetched, because the engine renews the lease only once the fetch has begun.
LEAST_LEFT_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverSettings:
    """Durations in seconds."""

    wait_s: float = 2.0  # least time for a prefill worker to accept the job; the router may ask for more
    transfer_s: float = 10.0  # from the hand-over to the first token


def pick(able: list[WorkerMember], peers: list[WorkerMember], rng: random.Random) -> str:
    """Choose the prefill worker to direct a job to if some lack the adapter. Empty: any prefill worker can do it."""
    return "" if len(able) in (0, len(peers)) else rng.choice(able).worker


@dataclass(slots=True)
class LastHandover:
    took_s: float = 0.0
    tokens: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HandoverDeps:
    """The dependencies that all hand-overs of a decode worker share. `rng` chooses among equal prefill workers."""

    client: PrefillClient
    engines: Sequences
    info: EngineInfo
    style: DisaggStyle
    worker: str
    rng: random.Random = field(default_factory=random.Random)  # choices, no secrets
    wall: Callable[[], float] = time.time


class RemotePrefillRun:
    """The remote prefill of a run: its first open choice is handed over, the others find its blocks in the cache."""

    def __init__(
        self,
        choices: list[ChoiceRun],
        decision: PrefillDecision,
        payload: bytes,
        deps: HandoverDeps,
        *,
        settings: HandoverSettings,
        last: LastHandover,
        lender: PrefixLender,
    ) -> None:
        self.waiting = list(choices)  # choices that are not in the engine yet
        self._choice = choices[0]
        self._decision = decision
        self._payload = payload
        self._client = deps.client
        self._engines = deps.engines
        self._info = deps.info
        self._style = deps.style
        self._worker = deps.worker
        self._rng = deps.rng
        self._wall = deps.wall
        self._settings = settings
        self._last = last
        self._lender = lender
        self._job = ""
        self._params: Mapping[str, Any] | None = None

    async def run(self) -> None:
        """Run until the first token has arrived, or this engine computes the prompt."""
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
                await self._try(directed, lends=attempt == 0)
            except PrefillFailed as error:
                metrics.PREFILL_FAILURES.labels(error.reason).inc()
                ids = log_ids(self._choice.run.envelope)
                log.warning("prefill.failed", **ids, job=self._job, reason=error.reason, why=str(error), attempt=attempt + 1)
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

    async def _try(self, directed: str, *, lends: bool) -> None:
        """Have one prefill worker compute the prompt and fetch its blocks. Raises PrefillFailed.

        With `lends` it may read the prefix that is cached here.
        """
        began_s = self._wall()
        prefix = await self._lender.lend(self._choice) if lends else None
        job = self._make_job(directed, prefix)
        await self._client.publish(job, directed=directed)
        taken = await self._client.taken(job.job, wait_s=max(self._decision.wait_s, self._settings.wait_s))
        if self._style is DisaggStyle.RENDEZVOUS:
            self._choice.computed_elsewhere = job.uncached  # Until the prefill side reports it, perhaps after the first token.
            first_token = self._hand_over(Handover(kind="decode", room=job.room, peer=taken.address))
            done = await self._await_rendezvous(first_token)
        else:
            done = await self._client.done(job.job)
            if prefix is not None:
                self._lender.release(self._choice)
            await self._client.confirm(job.job, least_s=LEAST_LEFT_S)
            self._params = done.params
            self._choice.handed_s = asyncio.get_running_loop().time()
            first_token = self._hand_over(Handover(kind="decode", params=done.params))
        self._choice.computed_elsewhere, self._choice.cached_elsewhere = done.computed, done.cached
        handed_s = self._wall()
        await self._first_token(first_token)
        self._observe(done, began_s, handed_s)

    def _make_job(self, directed: str, prefix: Mapping[str, Any] | None) -> PrefillJob:
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
            priority=choice.run.engine_priority,
            room=secrets.randbits(62) if self._style is DisaggStyle.RENDEZVOUS else None,
            emitted=pack_u32(emitted),
            block_size=envelope.block_size,
            hashes=envelope.hashes,
            payload=b"" if envelope.spill is not None else self._payload,
            spill=envelope.spill,
            rank=self._decision.rank if directed and directed == self._decision.worker else None,
            prefix=None if prefix is None else dict(prefix),
        )

    def _hand_over(self, handover: Handover) -> asyncio.Future[Fault | None]:
        if self._choice in self.waiting:
            self.waiting.remove(self._choice)
        return self._engines.hand_over(self._choice, handover)

    async def _await_rendezvous(self, first_token: asyncio.Future[Fault | None]) -> PrefillDone:
        """Wait until the prefill side has ended its part, or this engine reports a failed transfer. Raises PrefillFailed."""
        done = asyncio.ensure_future(self._client.done(self._job))
        try:
            both: list[asyncio.Future[Any]] = [done, first_token]
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if not done.done() and first_token.done() and first_token.result() is None:
                await asyncio.wait([done])  # The token was faster than the message.
            if done.done():
                return done.result()
        except PrefillFailed:
            if first_token.done() and first_token.result() is None:  # The job is lost, but its blocks have arrived.
                return PrefillDone(job=self._job, worker="", computed=self._choice.uncached)
            self._take_back()
            raise
        finally:
            done.cancel()
        raise self._transfer_failed(first_token.result())

    async def _first_token(self, first_token: asyncio.Future[Fault | None]) -> None:
        await asyncio.wait([first_token], timeout=self._settings.transfer_s)
        if not first_token.done():
            self._take_back()
            message = f"no first token within {self._settings.transfer_s:g} s after the hand-over"
            raise PrefillFailed("transfer_timeout", message)
        if first_token.result() is not None:
            raise self._transfer_failed(first_token.result())

    def _transfer_failed(self, fault: Fault | None) -> PrefillFailed:
        self._choice.handed_s = None
        self.waiting.insert(0, self._choice)  # The engine has dropped it.
        return PrefillFailed("transfer_failed", fault.message if fault is not None else "the engine did not say why")

    def _take_back(self) -> None:
        self._choice.handed_s = None
        self._engines.take_back(self._choice, self._params)
        self.waiting.insert(0, self._choice)

    def _observe(self, done: PrefillDone, began_s: float, handed_s: float) -> None:
        now = self._wall()
        choice = self._choice
        fetched = max(0, len(choice.prompt) + choice.run.choices[choice.choice].start - choice.cached_tokens)
        metrics.HANDOVER_S.labels("queue").observe(done.queued_s)
        metrics.HANDOVER_S.labels("prefill").observe(done.took_s)
        metrics.HANDOVER_TOKENS.inc(fetched)
        if self._style is DisaggStyle.PARAMS:  # In a rendezvous the transfer overlaps the prefill.
            metrics.HANDOVER_S.labels("transfer").observe(now - handed_s)
            self._last.took_s, self._last.tokens = now - handed_s, fetched
        log.debug(
            "prefill.handed_over",
            request_id=choice.run.id,
            job=self._job,
            by=done.worker,
            took_s=round(now - began_s, 4),
            queue_s=round(done.queued_s, 4),
            prefill_s=round(done.took_s, 4),
            read=done.read,
            transfer_s=round(now - handed_s, 4),
            tokens=fetched,
        )
