"""Removes what dead processes left in the store of files: chunks that never became an object, and contents without a record.

Any number of frontends may sweep at once.  Content is removed only if it is older than any write may take, and if a read from
the leader shows no record of it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable

import structlog

from headrace.broker.failed_deliveries import note_failure
from headrace.broker.files import metrics
from headrace.broker.files.records import file_key, is_file_id
from headrace.broker.files.store import FORGET_DELETED_S, LONGEST_WRITE_S
from headrace.jetstream.errors import JetStreamError, SubjectError
from headrace.jetstream.ports import Bucket, Messaging, ObjectBucket
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

SWEEP_S = 600.0
CHUNKS_IDLE_S = 3600.0
ORPHAN_S = 2 * LONGEST_WRITE_S


class FileSweeper:
    """Sweeps the store of files from time to time."""

    def __init__(self, messaging: Messaging, subjects: Subjects, *, now: Callable[[], float] = time.time) -> None:
        self._records: Bucket = messaging.bucket(subjects.bucket("files"))
        self._objects: ObjectBucket = messaging.objects(subjects.bucket("files"))
        self._now = now

    async def run(self) -> None:
        """Sweep until cancelled. The first time is chosen at random, so that frontends take turns."""
        await asyncio.sleep(SWEEP_S * random.random())  # noqa: S311  # it spreads the load
        while True:
            try:
                await self.sweep()
            except JetStreamError as error:  # the next sweep tries again
                log.warning("files.not_swept", error=str(error))
            except Exception as error:  # an object that nothing foresaw must not end the frontend
                note_failure("file", error)
            await asyncio.sleep(SWEEP_S)

    async def sweep(self) -> int:
        """Remove what is left over. Returns the number of things removed. Raises a JetStreamError."""
        chunks = await self._objects.sweep(idle_s=CHUNKS_IDLE_S)
        contents = await self._drop_contents()
        for what, count in (("chunks", chunks), ("contents", contents)):
            metrics.SWEPT.labels(what).inc(count)
        if chunks or contents:
            log.info("files.swept", chunks=chunks, contents=contents)
        return chunks + contents

    async def _drop_contents(self) -> int:
        known = {entry.key for entry in await self._records.entries("file.>")}
        removed = 0
        for found in await self._objects.list():
            tenant, _, file_id = found.name.partition("/")
            if not is_file_id(file_id):  # a part of an upload, which expires by itself
                continue
            try:
                key = file_key(tenant, file_id)
            except SubjectError as error:  # no object of ours, and it must not keep the sweep from the others
                log.warning("file.unknown_object", error=str(error)[:300])
                continue
            if key in known or self._now() - found.stored < ORPHAN_S or await self._records.get(key) is not None:
                continue
            await self._objects.delete(found.name, ttl_s=FORGET_DELETED_S)
            removed += 1
        return removed
