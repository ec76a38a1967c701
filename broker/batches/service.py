"""Batches of a frontend: created, read, listed and cancelled for clients, and run by their owner."""

from __future__ import annotations

import asyncio
import contextlib
import re
import time
from collections.abc import Callable

import msgspec
import structlog

from headrace.broker.batches import record as metrics
from headrace.broker.batches.batch_run import BatchParts, BatchRun, check_batches, check_rate
from headrace.broker.batches.record import NOBODY, BatchRecord, BatchUnknown, InputUnfit, move, new_batch_id
from headrace.broker.batches.settings import BatchSettings
from headrace.broker.batches.store import BatchFiles, BatchStore, BatchView, Leases
from headrace.broker.dead_letters import note_failure
from headrace.jetstream.errors import JetStreamError, RevisionConflict, SubjectError
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import LONGEST_DEADLINE_S

SHORTEST_S = 60

_FORM = re.compile(r"([0-9]{1,6})([smhd])\Z")
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}


def window_s(value: str) -> int:
    """Return a completion window in seconds. Raises ValueError naming it."""
    form = _FORM.match(value)
    length = int(form[1]) * _UNITS[form[2]] if form else 0
    if not SHORTEST_S <= length <= LONGEST_DEADLINE_S:
        raise ValueError(f"completion_window is {value[:40]!r}; it can be 24h, or a number of s, m, h or d from 1m to 7d")
    return length


log = structlog.get_logger()

PURPOSE = "batch"
CANCEL_TRIES = 16
PAUSE_S = 0.02


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    endpoint: str
    input_file_id: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None


class Batches:
    def __init__(
        self,
        store: BatchStore,
        files: BatchFiles,
        settings: BatchSettings,
        *,
        me: str,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._files = files
        self._settings = settings
        self._me = me
        self._wall = wall

    def disown(self) -> None:
        self._me = NOBODY

    async def create(self, tenant: str, new: NewBatch) -> BatchRecord:
        """Store a batch, which is validated later.

        Raises ValueError for a wrong window, InputGone and InputUnfit for a file that can be no batch, BatchQuotaExceeded,
        BatchRateExceeded, JetStreamError.
        """
        length_s = window_s(new.completion_window)
        facts = await self._files.facts(tenant, new.input_file_id)
        if facts.purpose != PURPOSE:
            raise InputUnfit(f"The file's purpose is {facts.purpose!r}; it must be {PURPOSE!r}.")
        if facts.size > self._settings.max_file_bytes:
            most = self._settings.max_file_bytes
            raise InputUnfit(f"The file has {facts.size} bytes; a batch may have {most}.")
        others = await self._store.of_tenant(tenant)
        now = self._wall()
        check_batches(tenant, others, self._settings)
        check_rate(tenant, others, self._settings, now)
        record = BatchRecord(
            id=new_batch_id(),
            tenant=tenant,
            endpoint=new.endpoint,
            input_file_id=new.input_file_id,
            completion_window=new.completion_window,
            created=now,
            expires_at=int(now + length_s),
            metadata=new.metadata,
            output_expires_s=new.output_expires_s,
            owner=self._me,
        )
        await self._store.create(record)
        log.info("batch.created", batch=record.id, tenant=tenant)
        return record

    async def get(self, tenant: str, batch_id: str) -> BatchRecord:
        return (await self._store.read(tenant, batch_id)).record

    async def list(self, tenant: str) -> list[BatchRecord]:
        return await self._store.of_tenant(tenant)

    async def cancel(self, tenant: str, batch_id: str) -> BatchRecord:
        """Begin to cancel a batch, and return it. One that writes its files already is let be, as every line has its result.

        Raises BatchUnknown, BatchChangeRefused if it has ended, JetStreamError.
        """
        for attempt in range(CANCEL_TRIES):
            stored = await self._store.read(tenant, batch_id)
            record = stored.record
            if record.status in ("cancelling", "finalizing", "expiring"):
                return record
            cancelled = move(record, "cancelling", now=self._wall())
            try:
                return (await self._store.replace(stored, cancelled)).record
            except RevisionConflict:
                await asyncio.sleep(PAUSE_S * attempt)
        raise RevisionConflict(f"batch {batch_id} was changed by its owner {CANCEL_TRIES} times meanwhile")


ROUND_S = 0.5
GIVE_UP_TRIES = 8  # of one batch, whose record a client may change meanwhile


class BatchOwner:
    """Runs the batches that this process owns, and takes over those whose owner is gone, while `run` is running."""

    def __init__(self, parts: BatchParts, view: BatchView, leases: Leases, *, me: str) -> None:
        self._parts = parts
        self._view = view
        self._leases = leases
        self._me = me
        self._tasks = TaskScope()
        self._runs: dict[str, asyncio.Task[None]] = {}
        self._draining = False
        self._taking: asyncio.Task[None] | None = None

    async def run(self) -> None:
        async with self._tasks:
            self._tasks.spawn(self._view.run())
            self._taking = self._tasks.spawn(self._rounds())

    async def drain(self, grace_s: float) -> None:
        """Take no more batches, and give up those that are carried here: others need not wait for the end of the lease."""
        self._draining = True
        self._view.wake()
        try:
            async with asyncio.timeout(grace_s):
                if self._taking is not None:
                    await asyncio.wait([self._taking])
                if runs := dict(self._runs):
                    self._forget()
                    await asyncio.wait(runs.values())
                for record in list(self._view.records()):
                    if record.owner == self._me or record.id in runs:
                        await self._give_up(record)
        except TimeoutError:
            log.warning("batch.not_given_up", error=f"not done within {grace_s:g} s")
        metrics.CARRIED.set(0)

    async def _give_up(self, seen: BatchRecord) -> None:
        """Leave a batch to the first frontend that takes it. One that cannot be given up waits for the end of the lease."""
        for _ in range(GIVE_UP_TRIES):
            try:
                stored = await self._parts.store.read(seen.tenant, seen.id)
                if stored.record.owner != self._me or not _needs_owner(stored.record):
                    return
                await self._parts.store.replace(stored, msgspec.structs.replace(stored.record, owner=NOBODY))
            except RevisionConflict:
                continue
            except (JetStreamError, BatchUnknown) as error:
                log.info("batch.not_given_up", batch=seen.id, error=str(error))
                return
            metrics.GIVEN_UP.inc()
            log.info("batch.given_up", batch=seen.id, status=stored.record.status)
            return

    async def _rounds(self) -> None:
        while not self._draining:
            if self._leases.held:
                for record in list(self._view.records()):
                    if _needs_owner(record) and record.id not in self._runs and not self._draining:
                        try:
                            await self._begin(record)
                        except Exception as error:  # one record must end neither the frontend nor the round
                            note_failure("batch", error, batch=record.id)
            else:
                self._forget()
            metrics.CARRIED.set(len(self._runs))
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._view.changed(), ROUND_S)

    async def _begin(self, record: BatchRecord) -> None:
        if record.owner != self._me:
            if record.owner != NOBODY and not await self._is_gone(record.owner):
                return
            if not await self._take(record):
                return
        batch_id = record.id
        run = BatchRun(self._parts, record.tenant, batch_id, self._me).run()
        task = self._tasks.spawn_guarded(run, lambda error: note_failure("batch", error, batch=batch_id))
        self._runs[batch_id] = task
        task.add_done_callback(lambda done: self._ended(batch_id, done))

    async def _is_gone(self, owner: str) -> bool:
        try:
            return not self._leases.ingress_live(owner) and await self._leases.ingress_gone(owner)
        except SubjectError:  # no process can have that name
            return True

    async def _take(self, seen: BatchRecord) -> bool:
        """Become the owner of a batch whose owner is gone. Returns False if another process was first."""
        try:
            stored = await self._parts.store.read(seen.tenant, seen.id)
            if stored.record.owner != seen.owner or not _needs_owner(stored.record):
                return False
            await self._parts.store.replace(stored, msgspec.structs.replace(stored.record, owner=self._me))
        except (RevisionConflict, BatchUnknown):
            return False
        except JetStreamError as error:
            log.info("batch.not_taken", batch=seen.id, error=str(error))
            return False
        metrics.TAKEN.inc()
        log.warning("batch.taken", batch=seen.id, owner=seen.owner, status=stored.record.status)
        return True

    def _forget(self) -> None:
        for task in self._runs.values():
            task.cancel()

    def _ended(self, batch_id: str, task: asyncio.Task[None]) -> None:
        if self._runs.get(batch_id) is task:
            del self._runs[batch_id]


def _needs_owner(record: BatchRecord) -> bool:
    return not record.final or record.notice == "due"
