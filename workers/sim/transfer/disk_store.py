"""The bytes of the disk tier: a file that NIXL's POSIX plugin writes and reads, beside the steps.

What a block holds is known (`content.py`), so its bytes are made when it is written, in a small staging memory, and are checked
there when it is read: what does not have its checksum, or is another block than it should be, is lost.  One transfer runs at a
time, a block that is asked for before it was written is written first, and the tiers' bookkeeping (`tiers.py`) bounds the rest.
"""

from __future__ import annotations

import os
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import structlog

from headrace.workers.sim.metrics import BROKEN_DISK
from headrace.workers.sim.transfer.block_content import Contents
from headrace.workers.sim.transfer.nixl.arena import Arena
from headrace.workers.sim.transfer.nixl.errors import DriverFailed
from headrace.workers.sim.transfer.nixl.files import BlockFile
from headrace.workers.sim.transfer.nixl.transfer import Transfer

_STAGED = 64  # blocks of one transfer at most
_LOOK_S = 0.0005  # how often a running transfer is looked at

log = structlog.get_logger()


@dataclass(slots=True, eq=False)
class Reading:
    """Blocks asked for by one sequence. `broken` are those that did not come as they should have been."""

    left: deque[int]  # values still to be read
    broken: set[int] = field(default_factory=set)
    reading: int = 0  # of the transfer under way
    quiet: bool = False  # nobody waits for it any more, or it was told to forget

    @property
    def done(self) -> bool:
        return not self.left and not self.reading


@dataclass(slots=True)
class _Work:
    """The transfer under way: for each staging block from 0 on, a value, and who asked for it."""

    transfer: Transfer
    values: list[int]
    reading: Reading | None  # None: they are written


class DiskStore:
    """`blocks` blocks in a file of this folder. The file has no name any more once it is open: it ends with the process."""

    def __init__(self, folder: Path, *, blocks: int, block_bytes: int, timeout_s: float, clock: Callable[[], float]) -> None:
        """`timeout_s`: deadline of one transfer. Raises EngineStartFailed, NixlUnavailable."""
        self._arena = Arena(_STAGED, block_bytes)
        self._contents = Contents(self._arena)
        self._clock = clock
        path = folder / f"headrace-{os.getpid()}-{uuid.uuid4().hex[:8]}.blocks"
        places = blocks + _STAGED  # what is dropped while it is written keeps its place until then
        self._file = BlockFile(path, self._arena, blocks=places, timeout_s=timeout_s, clock=clock)
        path.unlink()
        self._free = list(reversed(range(places)))  # low places first
        self._places: dict[int, int] = {}  # by value
        self._cells: dict[int, int] = {}  # by value: what its block is to hold
        self._unwritten: OrderedDict[int, None] = OrderedDict()
        self._readings: deque[Reading] = deque()
        self._work: _Work | None = None
        self._failed = False
        self.counts = {"written_disk_blocks": 0, "read_disk_blocks": 0, "broken_disk_blocks": 0}

    # -- what the tiers say ----------------------------------------------------------------------------------

    def put(self, value: int, cell: int) -> None:
        """This value is on disk from now on, in a block that holds this cell."""
        if self._cells.get(value) == cell:
            return
        self.drop(value)
        if not self._failed:
            self._places[value] = self._free.pop()
            self._cells[value] = cell
            self._unwritten[value] = None

    def drop(self, value: int) -> None:
        """It is not any more."""
        place = self._places.pop(value, None)
        self._cells.pop(value, None)
        if place is None:
            return
        self._unwritten.pop(value, None)
        if self._work is None or self._work.reading is not None or value not in self._work.values:
            self._free.append(place)
        else:
            self._work.values[self._work.values.index(value)] = -1 - place  # free when it has been written

    def clear(self) -> None:
        """Nothing is on disk any more. Whoever reads gets nothing, and that is no fault."""
        for reading in (*self._readings, *([self._work.reading] if self._work is not None and self._work.reading else [])):
            reading.quiet = True
            reading.broken.update(reading.left)
            reading.left.clear()
        for value in list(self._places):
            self.drop(value)

    # -- reading ---------------------------------------------------------------------------------------------

    def read(self, values: Iterable[int]) -> Reading:
        """Ask for these; they must stay until it is done, or is given up."""
        reading = Reading(deque(values))
        self._readings.append(reading)
        self._go_on()
        return reading

    def give_up(self, reading: Reading) -> None:
        """Nobody waits for it any more."""
        reading.left.clear()
        reading.quiet = True

    # -- moving on -------------------------------------------------------------------------------------------

    def poll_at(self) -> float | None:
        """When to `poll` next; None while nothing is under way."""
        return None if self._work is None and not self._unwritten and not self._readings else self._clock() + _LOOK_S

    def poll(self) -> bool:
        """Move on; whether a transfer ended."""
        ended = False
        if self._work is not None:
            self._file.poll()
            if self._work.transfer.state != "active":
                self._end(self._work)
                ended = True
        self._go_on()
        return ended

    def close(self) -> None:
        """Close the file, and so remove it. Twice is once."""
        self._failed = True
        self._work = None
        self._lose_all()
        self._file.close()

    def _go_on(self) -> None:
        if self._failed:
            self._lose_all()
            return
        if self._work is not None:
            return
        while self._readings and not self._readings[0].left:
            self._readings.popleft()
        if self._readings:
            wanted = list(self._readings[0].left)[:_STAGED]
            first = [value for value in wanted if value in self._unwritten]
            if first:
                self._write(first)
            else:
                self._read(self._readings[0], wanted)
        elif self._unwritten:
            self._write([value for value, _ in zip(self._unwritten, range(_STAGED), strict=False)])

    def _write(self, values: list[int]) -> None:
        for block, value in enumerate(values):
            del self._unwritten[value]
            self._contents.stamp(block, self._cells[value])
        self._start(values, None)

    def _read(self, reading: Reading, values: list[int]) -> None:
        for _ in values:
            reading.left.popleft()
        lost = [value for value in values if value not in self._places]  # its write failed
        self._lose(reading, lost)
        values = [value for value in values if value in self._places]
        if values:
            reading.reading = len(values)
            self._contents.expect(range(len(values)))
            self._start(values, reading)
        else:
            self._go_on()

    def _start(self, values: list[int], reading: Reading | None) -> None:
        staged, places = range(len(values)), [self._places[value] for value in values]
        try:
            transfer = self._file.load(places, staged) if reading is not None else self._file.store(staged, places)
        except DriverFailed as error:
            self._fail(str(error), values, reading)
            return
        self._work = _Work(transfer, values, reading)

    def _end(self, work: _Work) -> None:
        self._work = None
        if work.transfer.state != "done":
            self._fail(work.transfer.error, work.values, work.reading)
            return
        if work.reading is None:
            self.counts["written_disk_blocks"] += len(work.values)
            self._free += [-1 - value for value in work.values if value < 0]
            return
        self.counts["read_disk_blocks"] += len(work.values)
        work.reading.reading = 0
        cells = [self._cells.get(value) for value in work.values]
        read = [self._contents.read(block) for block in range(len(work.values))]
        self._lose(work.reading, [v for v, cell, got in zip(work.values, cells, read, strict=True) if cell != got])

    def _fail(self, why: str, values: list[int], reading: Reading | None) -> None:
        """A disk that fails once is not used again: bytes of that transfer may still be moving."""
        log.error("disk.failed", error=why, blocks=len(self._places), meaning="what is on disk is lost; the tier stays empty")
        self._failed = True
        if reading is not None:
            reading.reading = 0
            self._lose(reading, values)
        self._lose_all()

    def _lose_all(self) -> None:
        for reading in self._readings:
            reading.reading = 0
            left = list(reading.left)
            reading.left.clear()
            self._lose(reading, left)
        self._readings.clear()
        self._unwritten.clear()

    def _lose(self, reading: Reading, values: list[int]) -> None:
        if not values:
            return
        reading.broken.update(values)
        if reading.quiet:
            return
        self.counts["broken_disk_blocks"] += len(values)
        BROKEN_DISK.inc(len(values))
        log.warning("disk.blocks_broken", blocks=len(values), meaning="they are computed again")
