"""Carries one batch on: each step starts from a fresh read of its record, and ends in one compare-and-set at that revision.

Nothing that a step has done before its compare-and-set does harm if that is refused, or if another owner does it again: lines
are published under the same ids, ends of lines are written by create-once, and files have names that are new for each try.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import structlog

from headrace.broker.batches import record as metrics
from headrace.broker.batches.fan_out import FanOut, InputCopy, ScratchSpace
from headrace.broker.batches.record import (
    BatchQuotaExceeded,
    BatchRateExceeded,
    BatchRecord,
    BatchStatus,
    BatchUnknown,
    InputGone,
    InputInvalid,
    LineCounts,
    LineError,
    LineProgress,
    NoticeState,
    closed_line,
    closing,
    custom_id_of,
    end_of,
    large_line,
    line_name,
    move,
    overdue,
)
from headrace.broker.batches.results import POLLED_PAGE as PAGE
from headrace.broker.batches.results import ResultFiles, ResultPoller, SeenResults, new_try, pages
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.store import BatchFiles, BatchStore, EndNotice, JobStopper, LineResults, StoredBatch
from headrace.broker.batches.validation import VERSION, InputLimits, LinePlan, validate
from headrace.broker.errors import BrokerError
from headrace.broker.messages.durable import JobResult
from headrace.jetstream.errors import JetStreamError, RevisionConflict

HOUR_S = 3600.0


def check_batches(tenant: str, others: Iterable[BatchRecord], settings: BatchSettings) -> None:
    """Check that a tenant may have one more batch. Raises BatchQuotaExceeded."""
    count = sum(1 for record in others if record.tenant == tenant and not record.final)
    if count >= settings.tenant_batches:
        raise BatchQuotaExceeded(f"{count} batches have not ended; the limit is {settings.tenant_batches}")


def check_rate(tenant: str, others: Iterable[BatchRecord], settings: BatchSettings, now: float) -> None:
    """Check that a tenant may create one more batch in this hour, whatever became of the others. Raises BatchRateExceeded."""
    most = settings.tenant_batches_per_hour
    recent = sorted(record.created for record in others if record.tenant == tenant and record.created > now - HOUR_S)
    if len(recent) >= most:
        raise BatchRateExceeded(
            f"{len(recent)} batches were created in the last hour; the limit is {most}",
            retry_after_s=max(1.0, recent[-most] + HOUR_S - now),
        )


def check_quota(record: BatchRecord, plan: LinePlan, others: Iterable[BatchRecord], settings: BatchSettings) -> None:
    """Check that a batch fits beside the other ones of its tenant. Raises InputInvalid."""
    mine = [other for other in others if other.tenant == record.tenant and other.id != record.id]
    lines = sum(other.queued for other in mine)
    if lines + len(plan) > settings.tenant_lines:
        raise _over("queued_lines_exceeded", "lines", lines, len(plan), settings.tenant_lines)
    tokens, most = sum(other.queued_tokens for other in mine), settings.tenant_prompt_tokens
    if most and tokens + plan.prompt_tokens > most:
        raise _over("token_limit_exceeded", "prompt tokens", tokens, plan.prompt_tokens, most)


def _over(code: str, what: str, queued: int, more: int, most: int) -> InputInvalid:
    message = (
        f"The batch has {more} {what}, and {queued} are queued in other batches; the limit is {most}. "
        "Try again once some of them have ended."
    )
    return InputInvalid([LineError(code=code, message=message)])


T = TypeVar("T")


async def for_each(items: Iterable[T], work: Callable[[T], Awaitable[None]], *, at_once: int) -> None:
    left = iter(items)

    async def some() -> None:
        for item in left:
            await work(item)

    try:
        async with asyncio.TaskGroup() as group:
            for _ in range(at_once):
                group.create_task(some())
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None


LEAST_LEFT_S = 30.0  # time that a batch near its end still counts with
LINES_PER_SLOT = 4  # of the workers that serve the model: twice what carriers hold, so that none runs dry between two looks
LEAST_OUT = 32
FLOOR = 0.1  # the part of the window that is divided evenly, so that no batch waits for the end of another


def lines_out(slots: int, most: int) -> int:
    """Return how many lines of a model may be out at a time, by the slots of its workers.

    Lines that are out are delivered in the order in which they were stored, so one that is due soon waits for all before it.
    """
    return min(most, max(LEAST_OUT, LINES_PER_SLOT * slots))


def shares(records: Iterable[BatchRecord], window: int, now: float) -> dict[str, int]:
    """Return how many lines of each batch may be published and without a result.

    `records` are the batches in progress of one model, on all frontends. Each gets at least one line and at most those that
    are open. The urgency of a batch is the rate that it needs: its open lines per second until its end.
    """
    waiting = sorted((r for r in records if r.counts.open > 0), key=lambda r: (r.expires_at, r.created, r.id))
    if not waiting:
        return {}
    need = {r.id: r.counts.open / max(LEAST_LEFT_S, r.expires_at - now) for r in waiting}
    room = {r.id: r.counts.open for r in waiting}
    even = max(1, int(window * FLOOR / len(waiting)))
    given = {r.id: min(even, room[r.id]) for r in waiting}
    left = window - sum(given.values())
    while left > 0 and (hungry := [r for r in waiting if given[r.id] < room[r.id]]):
        total = sum(need[r.id] for r in hungry)
        before = left
        for r in hungry:
            more = min(int(before * need[r.id] / total), room[r.id] - given[r.id], left)
            given[r.id] += more
            left -= more
        if left == before:  # less than one line for each: the first ones get them
            for r in hungry[:left]:
                given[r.id] += 1
                left -= 1
    return given


log = structlog.get_logger()

COUNT_S = 2.0  # between two writes of counts alone
STRETCH = 256  # lines that are published before the cursor is moved
COMMITS = 32  # ends of lines that are written at once
RETRY_S = 0.2
LONGEST_RETRY_S = 5.0
FULL_S = 1.0  # wait after the queue of jobs was full
NOTICE_S = 1.0  # wait before the second call of the webhook; it doubles
LONGEST_NOTICE_S = 3600.0
KEPT_TRIES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchParts:
    """Dependencies of a batch run. `others` are all batches, as last reported; `wall` gives Unix time."""

    store: BatchStore
    files: BatchFiles
    results: LineResults
    fan_out: FanOut
    stopper: JobStopper
    notice: EndNotice | None
    settings: BatchSettings
    limits: InputLimits
    others: Callable[[], Iterable[BatchRecord]]
    scratch: ScratchSpace | None = None  # for input files and results; None: they are read from the broker again
    seen: SeenResults | None = None  # by the carrier of this process; None: all results are read from the broker
    slots: Callable[[str], int] | None = None  # of the workers that serve a model; None: not known
    wall: Callable[[], float] = time.time


class BatchRun:
    def __init__(self, parts: BatchParts, tenant: str, batch_id: str, me: str) -> None:
        self._parts = parts
        self._files = ResultFiles(parts.files, parts.results)
        self._tenant = tenant
        self._id = batch_id
        self._me = me
        self._plan: LinePlan | None = None
        self._copy: InputCopy | None = None  # of the input file
        self._poller: ResultPoller | None = None
        self._tries: list[str] = []  # of this owner
        self._counted_at = 0.0
        self._told = False  # the carriers know that the batch is being closed

    async def run(self) -> None:
        try:
            await self._carry_on()
        finally:
            self._drop_copy()
            if self._poller is not None:
                self._poller.close()

    async def _carry_on(self) -> None:
        wait_s = RETRY_S
        while True:
            try:
                if not await self._step():
                    return
                wait_s = RETRY_S
            except RevisionConflict:
                metrics.RETRIES.labels("conflict").inc()
            except BatchUnknown:
                return
            except (JetStreamError, BrokerError, msgspec.MsgspecError) as error:
                metrics.RETRIES.labels(type(error).__name__).inc()
                log.warning("batch.step_failed", batch=self._id, error=str(error) or type(error).__name__)
                await asyncio.sleep(wait_s)
                wait_s = min(2 * wait_s, LONGEST_RETRY_S)
            except Exception:  # a batch that cannot be carried on must not end one frontend after the other
                metrics.RETRIES.labels("crashed").inc()
                log.exception("batch.crashed", batch=self._id)
                await asyncio.sleep(LONGEST_RETRY_S)

    async def _step(self) -> bool:
        stored = await self._parts.store.read(self._tenant, self._id)
        record = stored.record
        if record.final or record.owner != self._me:
            await self._sweep_own(record)
        if record.owner != self._me:
            return False
        if record.final:
            return await self._tell_end(stored)
        if overdue(record, self._now()):
            await self._move(stored, "expiring")
        elif record.status == "validating":
            await self._validate(stored)
        elif record.status == "in_progress":
            await self._advance(stored)
        elif record.status == "finalizing":
            await self._finish(stored)
        else:
            await self._close(stored)
        return True

    # -- before it runs ---------------------------------------------------------------------------------------------------

    async def _validate(self, stored: StoredBatch) -> None:
        record = stored.record
        try:
            plan, model = await self._read_plan(record)
            check_quota(record, plan, self._parts.others(), self._parts.settings)
        except InputInvalid as error:
            await self._move(stored, "failed", errors=list(error.errors), notice=self._due())
            return
        except InputGone as error:
            gone = LineError(code="input_file_not_found", message=str(error))
            await self._move(stored, "failed", errors=[gone], notice=self._due())
            return
        self._plan = plan
        counts = LineCounts(total=len(plan))
        facts = {"model": model, "counts": counts, "prompt_tokens": plan.prompt_tokens}
        await self._move(stored, "in_progress", plan=VERSION, input_digest=plan.digest, **facts)

    async def _read_plan(self, record: BatchRecord) -> tuple[LinePlan, str]:
        chunks = self._parts.files.read(record.tenant, record.input_file_id)
        self._drop_copy()
        if self._parts.scratch is not None:
            self._copy = InputCopy(self._parts.scratch, record.id)
            chunks = self._copy.copied(chunks)
        return await validate(chunks, record.endpoint, self._parts.limits)

    def _drop_copy(self) -> None:
        if self._copy is not None:
            self._copy.close()
            self._copy = None

    async def _planned(self, record: BatchRecord) -> LinePlan:
        """Return the plan, from another pass over the input file if need be. Raises InputGone if that has changed."""
        if self._plan is None:
            try:
                plan, _ = await self._read_plan(record)
            except InputInvalid as error:
                raise InputGone(f"file {record.input_file_id} is not the one that was validated: {error}") from None
            if plan.digest != record.input_digest or len(plan) != record.counts.total:
                raise InputGone(f"file {record.input_file_id} is not the one that was validated")
            self._plan = plan
        return self._plan

    # -- while it runs ----------------------------------------------------------------------------------------------------

    async def _advance(self, stored: StoredBatch) -> None:
        record = stored.record
        try:
            plan = await self._planned(record)
            if record.plan != VERSION:  # an owner of another version has counted in another order
                await self._write(stored, msgspec.structs.replace(record, plan=VERSION, cursor=0))
                return
            poller = await self._looked(record, plan)
            progress = poller.progress
            if progress.complete:
                await self._move(stored, "finalizing", counts=progress.counts, tokens=progress.tokens)
            elif room := self._room(record, progress):
                await self._publish(stored, plan, poller, room)
            else:
                await self._count(stored, progress)
                await poller.pause()
        except InputGone as error:
            gone = LineError(code="input_file_not_found", message=str(error))
            await self._move(stored, "cancelling", errors=[gone])

    async def _looked(self, record: BatchRecord, plan: LinePlan) -> ResultPoller:
        """Return what was seen after a look at the results of lines that are out.

        A look that fails keeps what it has seen: a new owner's first one reads the results of all lines that were published.
        """
        poller = self._poller
        if poller is None:
            poller = self._poller = self._new_poller(record)
            poller.progress.publish(plan.published(0, record.cursor))
        await poller.look_at_out()
        return poller

    def _new_poller(self, record: BatchRecord) -> ResultPoller:
        return ResultPoller(self._parts.results, record, self._parts.scratch, self._parts.seen)

    def _room(self, record: BatchRecord, progress: LineProgress) -> int:
        """Return how many lines may be published now: none until there is room for a good part of a stretch."""
        left = record.counts.total - record.cursor
        if not left:
            return 0
        own = msgspec.structs.replace(record, counts=progress.counts)
        others = [
            r for r in self._parts.others() if r.status == "in_progress" and r.model == record.model and r.id != record.id
        ]
        share = shares([own, *others], self._window(record.model), self._now())[record.id]
        room = min(share - progress.waiting, STRETCH, left)
        return room if room >= min(left, max(1, min(share // 4, STRETCH))) else 0

    def _window(self, model: str) -> int:
        most, slots = self._parts.settings.window_lines, self._parts.slots
        return most if slots is None else lines_out(slots(model), most)

    async def _publish(self, stored: StoredBatch, plan: LinePlan, poller: ResultPoller, room: int) -> None:
        record, progress = stored.record, poller.progress
        numbers = plan.published(record.cursor, record.cursor + room)
        wanted = progress.open(numbers)
        lines = await self._parts.fan_out.lines(record, plan, wanted, self._copy)
        published = await self._parts.fan_out.publish(record, lines)
        for number in published.too_large:
            result = large_line(record.id, number, custom_id_of(lines[number]), self._now())
            await poller.see({number: await self._parts.results.commit(record.tenant, result.id, result)})
        if published.full:
            log.info("batch.queue_full", batch=record.id, cursor=record.cursor)
            await asyncio.sleep(FULL_S)
            return
        progress.publish(wanted)  # not before: lines that are not stored would be waited for
        await self._write(stored, self._counted(record, progress, cursor=record.cursor + room))

    async def _count(self, stored: StoredBatch, progress: LineProgress) -> None:
        now = self._now()
        if progress.counts != stored.record.counts and now - self._counted_at >= COUNT_S:
            self._counted_at = now
            await self._write(stored, self._counted(stored.record, progress))

    def _counted(self, record: BatchRecord, progress: LineProgress, **changes: Any) -> BatchRecord:
        return msgspec.structs.replace(record, counts=progress.counts, tokens=progress.tokens, **changes)

    # -- its end ----------------------------------------------------------------------------------------------------------

    async def _close(self, stored: StoredBatch) -> None:
        """Give every line without a result its end, also lines beyond the cursor: a late publish may have stored them."""
        record = stored.record
        poller = self._poller = self._poller or self._new_poller(record)
        progress = poller.progress
        if not progress.complete:
            try:
                plan = await self._planned(record) if record.counts.total else LinePlan()
            except InputGone as error:
                log.warning("batch.input_gone", batch=record.id, error=str(error))
                plan = None
            if plan is not None:
                progress.publish(plan.published(0, record.cursor))
            await self._close_lines(record, plan, poller, sorted(progress.out))
            await self._close_lines(record, plan, poller, range(1, record.counts.total + 1))
        await self._finish(stored)

    async def _close_lines(
        self, record: BatchRecord, plan: LinePlan | None, poller: ResultPoller, numbers: Iterable[int]
    ) -> None:
        for page in pages(poller.progress.open(numbers), PAGE):
            await poller.look(page)
            wanted = poller.progress.open(page)
            await self._end_lines(record, plan, poller, wanted)
            await self._parts.stopper.stop(record, [line_name(record.id, number) for number in wanted])
            metrics.LINES.labels("closed").inc(len(wanted))

    async def _end_lines(
        self, record: BatchRecord, plan: LinePlan | None, poller: ResultPoller, numbers: Sequence[int]
    ) -> None:
        how = closing(record.status)
        assert how is not None  # noqa: S101  # only called in states that close
        try:
            lines = await self._parts.fan_out.lines(record, plan, numbers, self._copy) if plan is not None else {}
        except InputGone:
            lines = {}
        ended: dict[int, JobResult] = {}

        async def end(number: int) -> None:
            result = closed_line(record.id, number, custom_id_of(lines.get(number, b"")), how, self._now())
            ended[number] = await self._parts.results.commit(record.tenant, result.id, result)

        await for_each(numbers, end, at_once=min(COMMITS, len(numbers)))
        await poller.see(ended)

    async def _finish(self, stored: StoredBatch) -> None:
        record = stored.record
        poller = self._poller = self._poller or self._new_poller(record)
        progress = poller.progress
        await poller.look(progress.open(range(1, record.counts.total + 1)))
        if not progress.complete:
            await poller.pause()
            return
        self._drop_copy()
        nonce = new_try()
        self._tries.append(nonce)
        stored = await self._write(stored, msgspec.structs.replace(record, tries=[*record.tries, nonce][-KEPT_TRIES:]))
        # From here on every write that names files of earlier tries is refused.
        await self._files.sweep(record, record.tries)
        files = await self._files.write(record, nonce, progress, poller.kept)
        await self._move(
            stored,
            end_of(record.status),
            output_file_id=files.output,
            error_file_id=files.error,
            counts=progress.counts,
            tokens=progress.tokens,
            notice=self._due(),
        )

    async def _sweep_own(self, record: BatchRecord) -> None:
        """Delete the files of this owner's tries that the record does not name: it was seen, so they can no longer win."""
        tries, self._tries = self._tries, []
        await self._files.sweep(record, tries)

    async def _tell_end(self, stored: StoredBatch) -> bool:
        """Call the webhook about the end. Returns False once that is over."""
        record, notice = stored.record, self._parts.notice
        if record.notice != "due":
            return False
        if record.notice_tries:
            await asyncio.sleep(min(NOTICE_S * 2 ** (record.notice_tries - 1), LONGEST_NOTICE_S))
        tries = record.notice_tries + 1
        outcome: NoticeState
        if notice is not None and await notice.send(record):
            outcome = "sent"
        else:
            outcome = "given_up" if notice is None or tries >= self._parts.settings.webhook_tries else "due"
        metrics.NOTICES.labels("failed" if outcome == "due" else outcome).inc()
        if outcome == "given_up":
            log.error("batch.webhook_given_up", batch=record.id, tries=tries)
        await self._write(stored, msgspec.structs.replace(record, notice=outcome, notice_tries=tries))
        return outcome == "due"

    # -- the record -------------------------------------------------------------------------------------------------------

    async def _move(self, stored: StoredBatch, status: BatchStatus, **changes: Any) -> StoredBatch:
        written = await self._write(stored, move(stored.record, status, now=self._now(), **changes))
        log.info("batch.moved", batch=self._id, status=status, tenant=self._tenant)
        if written.record.final:
            metrics.ENDED.labels(status).inc()
        return written

    async def _write(self, stored: StoredBatch, record: BatchRecord) -> StoredBatch:
        return await self._parts.store.replace(stored, record)

    def _due(self) -> NoticeState:
        return "due" if self._parts.notice is not None else "none"

    def _now(self) -> float:
        return self._parts.wall()
