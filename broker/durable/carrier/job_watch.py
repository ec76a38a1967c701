"""Looks after the jobs that are carried: extends their claims, and finds those that are overdue or were ended by others."""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker.codec import decode
from headrace.broker.durable import metrics
from headrace.broker.durable.carrier.carrier_deps import CarrierDeps
from headrace.broker.durable.carrier.held_job import HeldJob, HeldJobs
from headrace.broker.errors import WireError
from headrace.broker.failed_deliveries import note_failure
from headrace.broker.messages import Cancel, StreamEntry
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message
from headrace.jetstream.topology import JOB_ACK_WAIT_S

log = structlog.get_logger()

TICK_S = 0.5
EXTEND_S = JOB_ACK_WAIT_S / 3


class JobWatch:
    """Halts held jobs that have to end."""

    def __init__(self, deps: CarrierDeps, held: HeldJobs) -> None:
        self._deps = deps
        self._held = held

    async def run(self) -> None:
        """Look until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._tick())
            tasks.create_task(self._extend())
            tasks.create_task(self._poll())

    def on_cancel(self, message: Message) -> None:
        """Halt the jobs that a canceller names."""
        try:
            ids = set(decode(Cancel, message.data).ids)
        except WireError as error:
            log.error("cancel.malformed", error=str(error))
            return
        for held in self._held:
            if held.job.id in ids:
                held.halt("cancelled")

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_S)
            now = self._deps.wall()
            for held in self._held:
                if now >= held.job.deadline:
                    held.halt("expired")
            self._look_at_batches()

    async def _extend(self) -> None:
        while True:
            await asyncio.sleep(EXTEND_S)
            for phase, number in self._held.phases().items():
                metrics.CARRIED.labels(phase).set(number)
            if self._deps.ingress.lease_held:
                for held in self._held:
                    held.delivery.progress()

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(self._deps.settings.poll_s)
            try:
                await self.look()
            except (JetStreamError, WireError) as error:
                log.info("jobs.not_looked_at", error=str(error))
            except Exception as error:  # an entry that nothing foresaw must not end the frontend
                note_failure("entry", error)

    async def look(self) -> None:
        """Read the ends and the last entries of what is carried. Raises JetStreamError, WireError."""
        held_now = list(self._held)
        await self._look_at_results([held for held in held_now if not held.job.durable])
        await self._look_at_streams([held for held in held_now if held.job.durable])
        for held in held_now:
            if held.rendered is not None and not held.stop:
                self._deps.notices.step(held.ref, "progress", held.rendered.tokens.completion)

    async def _look_at_results(self, plain: list[HeldJob]) -> None:
        by_job = {(held.job.tenant, held.job.token): held for held in plain}
        if by_job:
            for key in await self._deps.results.get_all(list(by_job)):
                by_job[key].halt("seen")

    async def _look_at_streams(self, durable: list[HeldJob]) -> None:
        subjects = self._deps.subjects
        by_subject = {subjects.rsp(held.job.tenant, held.job.token): held for held in durable}
        if not by_subject:
            return
        for message in await self._deps.messaging.last_messages(subjects.stream("RSP"), list(by_subject)):
            held = by_subject[message.subject]
            try:
                entry = decode(StreamEntry, message.data)
            except WireError as error:  # its carrier ends a job whose entries cannot be read
                metrics.UNREADABLE_ENTRIES.inc()
                log.error("entry.malformed", stored_job=held.job.id, seq=message.seq, error=str(error))
                continue
            if message.seq > held.writer.last_seq and entry.nonce != held.nonce:
                held.halt("lost")

    def _look_at_batches(self) -> None:
        if self._deps.batches is None:
            return
        ends = {batch: self._deps.batches.closing(batch) for batch in {held.job.batch for held in self._held if held.job.batch}}
        for held in self._held:
            if (status := ends.get(held.job.batch)) is not None:
                held.halt(status)
