"""A disk tier: a file of KV blocks, filled from an arena and read back into it by NIXL's POSIX plugin."""

from __future__ import annotations

import os
import time
import uuid
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import structlog

from headrace.workers.errors import EngineStartFailed
from headrace.workers.sim.transfer.nixl.arena import Arena
from headrace.workers.sim.transfer.nixl.descriptors import cut, indices, pair
from headrace.workers.sim.transfer.nixl.driver import Driver
from headrace.workers.sim.transfer.nixl.errors import Closed, DriverFailed
from headrace.workers.sim.transfer.nixl.mover import Job, Mover
from headrace.workers.sim.transfer.nixl.transfer import Transfer

log = structlog.get_logger()

QUEUE = {"use_posix_aio": "true"}
"""Threads of the C library do the work. NIXL's default (kernel AIO) and io_uring read and write inside the call that starts
them when the file is not opened for direct I/O, and a busy disk then stops the event loop: 0.8 s was seen."""

_kept: list[object] = []
"""What threads may still use although its file was closed. Never freed: a number of a closed file may be another file's."""


class BlockFile:
    """A file of `blocks` blocks of the arena's block size, made anew: what lay in it before is gone.

    Belongs to one thread. Poll it while `active` is above 0; the system does the work in between. The blocks of an active or
    unsettled transfer belong to it. Nothing is forced to disk: this is a cache, not a store.
    """

    def __init__(
        self,
        path: Path,
        arena: Arena,
        *,
        blocks: int,
        timeout_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`timeout_s`: deadline of transfers that name none. Raises NixlUnavailable, and EngineStartFailed when the file cannot
        be made that large.
        """
        self.path = path
        self.blocks = blocks
        self._arena = arena
        self._timeout_s = timeout_s
        self._clock = clock
        self._closed = False
        size = blocks * arena.block_bytes
        name = f"file-{uuid.uuid4().hex[:12]}"
        self._driver = Driver(name, "POSIX", QUEUE)
        self._file = _make(path, size)
        try:
            self._registered = [
                self._driver.register("DRAM", arena.address, arena.size),
                self._driver.register("FILE", 0, size, self._file, str(path)),
            ]
            self._memory = self._driver.prepare(None, "DRAM", arena.address, arena.block_bytes, arena.blocks)
            self._places = self._driver.prepare(name, "FILE", 0, arena.block_bytes, blocks, self._file)
        except DriverFailed:
            os.close(self._file)
            raise
        self._mover = Mover(self._driver, clock=clock, lost=lambda peer: None)

    def store(self, local: Sequence[int], places: Sequence[int], *, timeout_s: float | None = None) -> Transfer:
        """Copy the arena's blocks `local` to these places of the file, pair by pair. Raises BadBlocks, BlocksBusy, Closed."""
        return self._start("store", local, places, timeout_s)

    def load(self, places: Sequence[int], local: Sequence[int], *, timeout_s: float | None = None) -> Transfer:
        """Copy these places of the file into the arena's blocks `local`, pair by pair. Raises BadBlocks, BlocksBusy, Closed."""
        return self._start("load", local, places, timeout_s)

    def poll(self) -> list[Transfer]:
        """Move transfers on; those that ended since the last call."""
        self._check_open()
        self._mover.advance()
        return self._mover.take_ended()

    @property
    def active(self) -> int:
        """Transfers under way, and those that ended but that no poll has returned yet."""
        return self._mover.active

    @property
    def unsettled(self) -> int:
        """Transfers that failed and may still touch memory or the file."""
        return self._mover.unsettled

    def close(self) -> None:
        """Fail what is under way and close the file, which stays where it is. Twice is once."""
        if self._closed:
            return
        self._mover.fail_all("closed", f"{self.path} was closed")
        self._closed = True
        if self._mover.unsettled:
            log.warning("file.kept", path=str(self.path), transfers=self._mover.unsettled, meaning="it stays open")
            _kept.append((self._driver, self._arena))
            return
        try:
            self._driver.unprepare(self._memory)
            self._driver.unprepare(self._places)
            for ranges in self._registered:
                self._driver.deregister(ranges)
        except DriverFailed as error:
            log.warning("file.not_closed", path=str(self.path), error=str(error))
        self._driver.close()
        os.close(self._file)

    def _start(
        self, op: Literal["store", "load"], local: Sequence[int], places: Sequence[int], timeout_s: float | None
    ) -> Transfer:
        self._check_open()
        ours = indices(local, self._arena.blocks, "local")
        theirs = indices(places, self.blocks, "file")
        ours, theirs = pair(ours, theirs, into="local" if op == "load" else "remote")
        self._mover.check_free(ours)
        now = self._clock()
        transfer = Transfer(op, str(self.path), ours, len(ours) * self._arena.block_bytes)
        job = Job(
            transfer=transfer,
            parts=deque(cut(ours, theirs, block_bytes=self._arena.block_bytes)),
            make=partial(self._driver.make, "READ" if op == "load" else "WRITE", self._memory, self._places),
            began_s=now,
            deadline_s=now + (self._timeout_s if timeout_s is None else timeout_s),
        )
        self._mover.start(job)
        return transfer

    def _check_open(self) -> None:
        if self._closed:
            raise Closed(f"{self.path} was closed")


def _make(path: Path, size: int) -> int:
    """An open file of this size. Room on the disk is taken now: later a full disk would be an error per block."""
    try:
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise EngineStartFailed(f"the file tier {path} cannot be made: {error}") from error
    try:
        os.posix_fallocate(file, 0, size)
    except OSError as error:
        os.close(file)
        raise EngineStartFailed(f"the file tier {path} cannot take {size} bytes: {error}") from error
    return file
