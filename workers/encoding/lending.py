"""Memory that an encode worker lends and serving workers read over NIXL, without this worker's doing."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

import structlog

from headrace.base.errors import HeadraceError
from headrace.broker.messages.requests import LentRecord
from headrace.workers.errors import TransferFailed
from headrace.workers.nixl.agent import Agent
from headrace.workers.nixl.descriptors import Arena, Closed
from headrace.workers.nixl.mover import Transfer

# Chooses the places of records in a ring of equal blocks: a new record takes those of the oldest ones. No I/O, no memory.

REST_S = 10.0
"""How long a record is left alone after it was offered, so that those who were told of it have read it by then."""


@dataclass(frozen=True, slots=True)
class Place:
    """`size` bytes in `count` blocks from `first` on."""

    first: int
    count: int
    size: int

    def overlaps(self, first: int, count: int) -> bool:
        return self.first < first + count and first < self.first + self.count


class Shelf:
    """The places of the newest records, by name."""

    def __init__(
        self, blocks: int, block_bytes: int, *, rest_s: float = REST_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._blocks = blocks
        self._block_bytes = block_bytes
        self._rest_s = rest_s
        self._clock = clock
        self._next = 0
        self._places: dict[str, Place] = {}
        self._offered_s: dict[str, float] = {}

    def __len__(self) -> int:
        return len(self._places)

    def find(self, name: str) -> Place | None:
        """Return the place of a record that is about to be offered, or None if it is not there."""
        place = self._places.get(name)
        if place is not None:
            self._offered_s[name] = self._clock()
        return place

    def add(self, name: str, size: int) -> Place | None:
        """Give a record a place. None: it is larger than everything, or would take that of one which may just be read."""
        count = max(1, -(-size // self._block_bytes))
        if count > self._blocks:
            return None
        self.drop(name)
        first = self._next if self._next + count <= self._blocks else 0
        taken = [other for other, place in self._places.items() if place.overlaps(first, count)]
        now_s = self._clock()
        if any(now_s - self._offered_s[other] < self._rest_s for other in taken):
            return None
        for other in taken:
            self.drop(other)
        place = Place(first, count, size)
        self._places[name] = place
        self._offered_s[name] = now_s
        self._next = first + count
        return place

    def drop(self, name: str) -> None:
        """Forget a record; an absent one is fine."""
        self._places.pop(name, None)
        self._offered_s.pop(name, None)


BLOCK_BYTES = 64 << 10
LENT_BYTES = 256 << 20
"""Memory for records in an encode worker; the embeddings of some 50 images of 1,000 tokens of a model of 7 billion weights."""


class LentMemory:
    """The newest records, as offers. Takes half a second to make, in a thread."""

    def __init__(self, name: str, *, least_bytes: int, most_bytes: int = LENT_BYTES) -> None:
        """`least_bytes`: smaller records go by the object store. Raises NixlUnavailable, DriverFailed."""
        blocks = max(1, most_bytes // BLOCK_BYTES)
        self._arena = Arena(blocks, BLOCK_BYTES)
        self._agent = Agent(name, self._arena)
        self._shelf = Shelf(blocks, BLOCK_BYTES)
        self._least_bytes = least_bytes

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()
        finally:
            self._agent.close()

    def find(self, name: str) -> LentRecord | None:
        """Offer a record that is here already."""
        place = self._shelf.find(name)
        return LentRecord(card=self._agent.card, first=place.first, size=place.size) if place is not None else None

    async def lend(self, name: str, record: bytes) -> LentRecord | None:
        """Keep a record and offer it. None: it is too small or too large for this, or there is no room just now."""
        if len(record) < self._least_bytes:
            return None
        place = self._shelf.add(name, len(record))
        if place is None:
            return None
        await asyncio.to_thread(self._arena.write, place.first, record)
        return self.find(name)

    async def record(self, lent: LentRecord) -> bytes:
        """Return the bytes of a record, for those who cannot read them by themselves."""
        return await asyncio.to_thread(self._arena.read, lent.first, lent.size)


log = structlog.get_logger()

READ_BYTES = 64 << 20
"""Memory for records on their way into a serving worker; a larger record goes by the object store."""
MOST_PEERS = 64  # encode workers that are remembered
_PAUSE_S = 0.00005  # after a poll that ended nothing
_LONGEST_PAUSE_S = 0.001
_SETTLE_S = 0.1  # between two looks at transfers that were given up


@dataclass(slots=True, eq=False)
class _Read:
    lent: LentRecord
    until_s: float
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[bytes]
    blocks: list[int] = field(default_factory=list)
    transfer: Transfer | None = None

    def end(self, result: bytes | HeadraceError) -> None:
        """Hand the result to the caller, from another thread."""
        try:
            self.loop.call_soon_threadsafe(self._settle, result)
        except RuntimeError:  # The loop is closed, so no caller waits.
            return

    def _settle(self, result: bytes | HeadraceError) -> None:
        if self.future.done():
            return
        if isinstance(result, bytes):
            self.future.set_result(result)
        else:
            self.future.set_exception(result)


class RecordReader:
    """Reads several records at a time. Takes half a second to make, in a thread."""

    def __init__(self, name: str, *, most_bytes: int = READ_BYTES) -> None:
        """Raises NixlUnavailable, DriverFailed."""
        blocks = max(1, most_bytes // BLOCK_BYTES)
        self._arena = Arena(blocks, BLOCK_BYTES)
        self._agent = Agent(name, self._arena)
        self._free = list(range(blocks))
        self._peers: OrderedDict[str, None] = OrderedDict()
        self._asked: queue.SimpleQueue[_Read | None] = queue.SimpleQueue()
        self._waiting: deque[_Read] = deque()
        self._moving: list[_Read] = []
        self._given_up: list[_Read] = []
        self._closed = False

    @property
    def most_bytes(self) -> int:
        """The largest record that can be read, 0 when no more are."""
        return 0 if self._closed else self._arena.size

    async def run(self) -> None:
        thread = threading.Thread(target=self._work, name="embeddings", daemon=True)
        thread.start()
        try:
            await asyncio.Event().wait()
        finally:
            self._closed = True
            self._asked.put(None)

    async def read(self, lent: LentRecord, *, timeout_s: float) -> bytes:
        """Return the bytes of an offer, which may have been overwritten meanwhile. Raises TransferFailed, BadCard."""
        if self._closed:
            raise Closed("this worker reads no more")
        if lent.size > self._arena.size:
            raise TransferFailed(f"a record of {lent.size} bytes is larger than the memory for it")
        loop = asyncio.get_running_loop()
        asked = _Read(lent, time.monotonic() + timeout_s, loop, loop.create_future())
        self._asked.put(asked)
        try:
            async with asyncio.timeout(timeout_s + 1.0):
                return await asked.future
        except TimeoutError as error:
            raise TransferFailed(f"{lent.size} bytes of another worker did not arrive within {timeout_s:g} s") from error

    # -- in the thread -----------------------------------------------------------------------------------------

    def _work(self) -> None:
        pause_s = _PAUSE_S
        try:
            while self._take():
                self._begin()
                if self._poll() or not self._moving:
                    pause_s = _PAUSE_S
                else:
                    time.sleep(pause_s)
                    pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        except HeadraceError as error:
            log.exception("embeddings.reader_failed", error=str(error), meaning="they come by the object store from now on")
        self._closed = True
        for asked in (*self._waiting, *self._moving):
            asked.end(Closed("this worker reads no more"))
        self._agent.close()

    def _take(self) -> bool:
        """Accept requests; wait for one while no transfer is active. Returns False at the end."""
        timeout_s = _SETTLE_S if self._waiting or self._given_up else None
        try:
            asked = self._asked.get(block=not self._moving, timeout=timeout_s)
        except queue.Empty:
            return True
        if asked is not None:
            self._waiting.append(asked)
        return asked is not None

    def _begin(self) -> None:
        while self._waiting:
            asked = self._waiting[0]
            count = max(1, -(-asked.lent.size // BLOCK_BYTES))
            if asked.future.done() or time.monotonic() >= asked.until_s:
                self._waiting.popleft()
                asked.end(TransferFailed("there was no room for the record in time"))
                continue
            if count > len(self._free):
                return
            self._waiting.popleft()
            asked.blocks, self._free = self._free[:count], self._free[count:]
            self._post(asked, count)

    def _post(self, asked: _Read, count: int) -> None:
        try:
            peer = self._agent.meet(asked.lent.card)
            self._remember(peer)
            there = range(asked.lent.first, asked.lent.first + count)
            left_s = asked.until_s - time.monotonic()
            asked.transfer = self._agent.read(peer, there, asked.blocks, timeout_s=left_s)
        except HeadraceError as error:
            self._free += asked.blocks
            asked.end(error)
            return
        self._moving.append(asked)

    def _remember(self, peer: str) -> None:
        self._peers[peer] = None
        self._peers.move_to_end(peer)
        while len(self._peers) > MOST_PEERS:
            oldest, _ = self._peers.popitem(last=False)
            self._agent.forget(oldest)

    def _poll(self) -> bool:
        self._agent.poll()
        ended = [asked for asked in self._moving if asked.transfer is not None and asked.transfer.state != "active"]
        for asked in ended:
            self._moving.remove(asked)
            self._end(asked)
        for asked in [asked for asked in self._given_up if asked.transfer is None or asked.transfer.settled]:
            self._given_up.remove(asked)
            self._free += asked.blocks
        return bool(ended)

    def _end(self, asked: _Read) -> None:
        transfer = asked.transfer
        if transfer is None or transfer.state == "failed":
            self._given_up.append(asked)  # a peer that stands still may write into these blocks later
            asked.end(TransferFailed(transfer.error if transfer is not None else "it was not begun"))
            return
        data = b"".join(self._arena.read(block, BLOCK_BYTES) for block in asked.blocks)
        self._free += asked.blocks
        asked.end(data[: asked.lent.size])
