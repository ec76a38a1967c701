"""Runs the prefill side of hand-overs: jobs of the prefill queue become sequences of the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Container, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import msgspec
import structlog

from headrace.broker.codec import decode, unpack_u32, unpack_u64
from headrace.broker.errors import WireError
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.prefill import PrefillDone, PrefillJob
from headrace.broker.messages.requests import Generation
from headrace.workers import metrics
from headrace.workers.engine import DisaggStyle, Engine, EngineInfo, Fault, Handover, Output, Sequence
from headrace.workers.kv.feed import cached_tokens
from headrace.workers.runtime.choice import ChoiceRun
from headrace.workers.runtime.sequences import MediaOrigin, RawSubmissions

log = structlog.get_logger()

OnFinished = Callable[[PrefillDone], None]


@dataclass(slots=True, eq=False)
class _RunningPrefill:
    job: PrefillJob
    finished: OnFinished
    sequence: Sequence
    began_s: float
    cached: int = 0
    read: int = 0  # tokens read from the decode worker's engine


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks:
    """The clocks of a prefill side: `wall` in Unix time, `monotonic` for durations."""

    wall: Callable[[], float] = time.time
    monotonic: Callable[[], float] = time.monotonic


CLOCKS = Clocks()


class PrefillSide:
    """Implements `headrace.broker.prefill_server.PrefillExecutor`."""

    def __init__(
        self,
        engine: Engine,
        info: EngineInfo,
        raw: RawSubmissions,
        *,
        worker: str,
        caches: Seq[Callable[[], Container[int]]],
        clocks: Clocks = CLOCKS,
    ) -> None:
        """`caches`: per rank, returns the chain values of the blocks that the engine has cached; empty = that is not known."""
        self._engine = engine
        self._info = info
        self._raw = raw
        self._worker = worker
        self._caches = caches
        self._wall = clocks.wall
        self._clock = clocks.monotonic
        self._running: dict[str, _RunningPrefill] = {}

    @property
    def lease_s(self) -> float:
        return self._info.lease_s

    @property
    def address(self) -> str:
        return self._info.address

    def uncached(self, job: PrefillJob) -> int:
        if not self._caches or not job.hashes:
            return job.tokens
        try:
            chain = unpack_u64(job.hashes)
        except WireError:
            return job.tokens
        cache, own = self._caches[self._rank(job) or 0](), self._info.block_size
        return job.tokens - cached_tokens(chain, job.tokens, block_size=job.block_size, cache=cache, engine_block=own)

    def start(self, job: PrefillJob, payload: bytes, finished: OnFinished) -> None:
        try:
            sequence = self._sequence(job, payload)
        except WireError as error:
            fault = JobFault("invalid_request", f"malformed payload: {error}")
            finished(PrefillDone(job=job.job, worker=self._worker, fault=fault))
            return
        self._running[job.job] = _RunningPrefill(job, finished, sequence, self._clock())
        self._submit(job, sequence)

    def _submit(self, job: PrefillJob, sequence: Sequence) -> None:
        self._raw.submit_raw(sequence, self._on_output, MediaOrigin(job.id, job.spill) if sequence.media else None)

    def stop(self, job: str) -> None:
        self._running.pop(job, None)
        self._raw.abort_raw(job)

    def _rank(self, job: PrefillJob) -> int | None:
        """Return the rank that a job names, None if the engine has only one or not that one."""
        return job.rank if job.rank is not None and 1 < self._info.ranks > job.rank else None

    def _sequence(self, job: PrefillJob, payload: bytes) -> Sequence:
        """Build the engine's sequence for a job. Raises WireError."""
        generation = decode(Generation, payload)
        tokens = unpack_u32(generation.token_ids) + unpack_u32(job.emitted)
        sampling = generation.sampling
        if self._info.prefill_samples:
            least = max(0, sampling.min_tokens - len(job.emitted) // 4)
            sampling = msgspec.structs.replace(sampling, max_tokens=1, min_tokens=min(1, least))
        else:  # The decode side samples the token. Here only the prompt counts.
            sampling = msgspec.structs.replace(sampling, max_tokens=1, min_tokens=0, stop_token_ids=[], seed=None)
        return Sequence(
            id=job.job,
            token_ids=tokens,
            prompt_tokens=len(tokens),
            sampling=sampling,
            logprobs=generation.logprobs if self._info.prefill_samples else None,
            adapter=generation.adapter,
            cache_salt=generation.cache_salt,
            session_id=generation.session_id,
            priority=job.priority,
            rank=self._rank(job),
            media=generation.media,
            handover=Handover(kind="prefill", room=job.room, params=job.prefix),
            expected_cached=len(tokens) - self.uncached(job),
            extra=generation.extra,
        )

    def _on_output(self, output: Output) -> None:
        running = self._running.get(output.id)
        if running is None:
            return
        if output.cached_tokens is not None:
            running.cached = output.cached_tokens
            running.read = (output.extra or {}).get("remote_tokens", 0)
        if output.fault is not None:
            if not self._without_prefix(running, output.fault):
                self._end(output.id, _job_fault(output.fault))
        elif output.finish == "abort":
            self._end(output.id, JobFault("engine_error", "the engine aborted the prefill", retriable=True))
        elif output.finish is not None:
            needs_params = self._engine.capabilities.disagg is DisaggStyle.PARAMS
            if needs_params and output.handover is None:
                self._end(output.id, JobFault("engine_error", "the engine gave no hand-over parameters", retriable=True))
            else:
                self._end(output.id, None, output.handover)

    def _without_prefix(self, running: _RunningPrefill, fault: Fault) -> bool:
        """Compute a prompt whole after its lent prefix could not be read. Returns false if there was none."""
        lent = running.sequence.handover
        if lent is None or lent.params is None or not fault.retriable:
            return False
        job = running.job
        log.warning("prefill.prefix_not_read", request_id=job.id, job=job.job, decode=job.decode, why=fault.message)
        metrics.PREFIX_READS.labels("failed").inc()
        whole = msgspec.structs.replace(running.sequence, handover=Handover(kind="prefill", room=lent.room))
        running.sequence, running.cached, running.read = whole, 0, 0
        self._submit(job, whole)
        return True

    def _end(self, job: str, fault: JobFault | None, params: Mapping[str, Any] | None = None) -> None:
        running = self._running.pop(job)
        now = self._clock()
        took_s = now - running.began_s
        computed = max(0, len(running.sequence.token_ids) - running.cached - running.read)
        if fault is None:
            metrics.PREFILLED_TOKENS.labels("computed").inc(computed)
            metrics.PREFILLED_TOKENS.labels("cached").inc(running.cached)
            metrics.PREFILLED_TOKENS.labels("read").inc(running.read)
            lent = running.sequence.handover
            if lent is not None and lent.params is not None:
                metrics.PREFIX_READS.labels("read" if running.read else "not_needed").inc()
        running.finished(
            PrefillDone(
                job=job,
                worker=self._worker,
                params=None if params is None else dict(params),
                cached=running.cached,
                computed=computed,
                read=running.read,
                queued_s=max(0.0, self._wall() - took_s - running.job.created),
                took_s=took_s,
                fault=fault,
            )
        )


def _job_fault(fault: Fault) -> JobFault:
    return JobFault(fault.code, fault.message, retriable=fault.retriable)


# Lends the prefix of a prompt that a decode worker has cached to the prefill worker, which reads it instead of computing it.
#
# The engine computes the prefix and a token more once again, which its cache makes one token, and keeps the blocks for a
# lease. They are released when the prefill worker has done its job. After a job that failed they stay to the end of the
# lease: the prefill worker may still be reading, and would take whatever is written there next for its own.

LEAST_TOKENS = 64
"""Fewer are computed sooner than they are read; vLLM reads no fewer either (`kv_recompute_threshold`)."""
WITHIN_S = 2.0
"""Seconds that a request waits for the engine to lend; it takes a step."""


class PrefixLender:
    """Lends prefixes of prompts. Without `EngineInfo.lends` it lends nothing."""

    def __init__(self, raw: RawSubmissions, info: EngineInfo) -> None:
        self._raw = raw
        self._info = info

    async def lend(self, choice: ChoiceRun) -> Mapping[str, Any] | None:
        """Lend the whole blocks of a choice's prompt that the cache has. Returns their parameters, None if there are none."""
        size = self._info.block_size
        whole = (choice.tokens - choice.uncached) // size * size
        if not self._info.lends or whole < max(LEAST_TOKENS, size) or choice.generation.media:
            return None
        sequence = choice.sequence(Handover(kind="lend"))
        sequence = msgspec.structs.replace(
            sequence,
            id=_loan(choice),
            token_ids=sequence.token_ids[: whole + 1],
            prompt_tokens=whole + 1,
            sampling=msgspec.structs.replace(sequence.sampling, max_tokens=1, min_tokens=0, stop_token_ids=[], seed=None),
            logprobs=None,
            guided=None,
            expected_cached=whole,
        )
        ended: asyncio.Future[Output] = asyncio.get_running_loop().create_future()

        def on_output(output: Output) -> None:
            if (output.finish is not None or output.fault is not None) and not ended.done():
                ended.set_result(output)

        self._raw.submit_raw(sequence, on_output)
        try:
            async with asyncio.timeout(WITHIN_S):
                output = await ended
        except TimeoutError:
            self.release(choice)
            self._not_lent(choice, f"the engine lent nothing within {WITHIN_S:g} s")
            return None
        except asyncio.CancelledError:
            self.release(choice)
            raise
        if output.fault is not None or output.handover is None:
            self._not_lent(choice, output.fault.message if output.fault is not None else "it ended without parameters")
            return None
        metrics.PREFIX_LOANS.labels("lent").inc()
        return output.handover

    def release(self, choice: ChoiceRun) -> None:
        """Withdraw the prefix lent for a choice. Call it once no worker reads it."""
        self._raw.abort_raw(_loan(choice))

    def _not_lent(self, choice: ChoiceRun, why: str) -> None:
        metrics.PREFIX_LOANS.labels("failed").inc()
        log.warning("prefix.not_lent", request_id=choice.run.id, why=why)


def _loan(choice: ChoiceRun) -> str:
    return f"{choice.id}~lent"
