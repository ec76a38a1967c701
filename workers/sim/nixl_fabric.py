"""Prometheus metrics of hand-overs between simulated engines."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np
import structlog
from numpy.typing import NDArray
from xxhash import xxh3_64_intdigest

from headrace.base.metrics import Counter
from headrace.workers.errors import TransferFailed
from headrace.workers.nixl.agent import Agent
from headrace.workers.nixl.descriptors import Arena, BadBlocks, BadCard
from headrace.workers.nixl.mover import Transfer as NixlTransfer
from headrace.workers.sim.fabric import Member, Notice, Transfer

BROKEN = Counter("headrace_sim_broken_blocks_total", "Blocks of another engine that arrived with a wrong checksum")
STRANGE = Counter("headrace_sim_strange_messages_total", "Notices and cards of other engines that could not be used", ["what"])


# The layout of a block's bytes: the cell it holds, and a checksum that shows whether they all arrived.
#
#     cell (8 bytes) | xxh3 of the body, xor cell (8 bytes) | body: a pattern, xor cell
#
# Bodies are written when a block is put on offer and not when it is computed: a simulator need not copy more than it hands
# over. A later overwrite changes only the first sixteen bytes; they are then valid, but of another cell.

LEAST_BYTES = 64  # smallest block; a multiple of 8
_HEAD = 2  # words
_ODD = 0x9E3779B97F4A7C15
_WORD = (1 << 64) - 1


class Contents:
    """The contents of one arena's blocks."""

    def __init__(self, arena: Arena) -> None:
        self._arena = arena
        words = arena.block_bytes // 8 - _HEAD
        self._pattern: NDArray[np.uint64] = np.arange(1, words + 1, dtype=np.uint64) * np.uint64(_ODD)
        self._sound: set[int] = set()  # blocks whose checksum is right, as far as is known
        self._changes = 0

    def stamp(self, block: int, cell: int) -> None:
        words = self._words(block)
        if block in self._sound and int(words[0]) == cell:
            return
        body = words[_HEAD:]
        np.bitwise_xor(self._pattern, np.uint64(cell), out=body)
        words[0] = cell
        words[1] = xxh3_64_intdigest(body.data) ^ cell
        self._sound.add(block)

    def overwrite(self, block: int) -> None:
        """Change this block to another, unknown cell."""
        words = self._words(block)
        self._changes += 1
        change = self._changes * _ODD & _WORD
        words[0] = int(words[0]) ^ change
        words[1] = int(words[1]) ^ change

    def expect(self, blocks: Sequence[int]) -> None:
        """Expect writes of other engines to these blocks from now on."""
        self._sound.difference_update(blocks)

    def read(self, block: int) -> int | None:
        """Read the cell of this block. Returns None when its checksum is wrong."""
        words = self._words(block)
        cell = int(words[0])
        if int(words[1]) != xxh3_64_intdigest(words[_HEAD:].data) ^ cell:
            return None
        self._sound.add(block)
        return cell

    def _words(self, block: int) -> NDArray[np.uint64]:
        return self._arena.view(block).view(np.uint64)


# The fabric between processes: real bytes in registered memory, moved by NIXL; notices as NIXL's notifications.
#
# An engine polls: often while something moves, seldom while it only waits. Between processes of one machine the polls do the
# copying.

_IDLE_S = 0.05  # between two polls for notices while no hand-over is open
_BUSY_S = 0.002  # between two polls while a hand-over is open
_MOVING_S = 0.001  # between two polls during a transfer that polling does not help
_STILL_S = 0.0001  # a poll that takes less than this has copied nothing
_MOST_STILL = 20  # such polls in a row end polling without a pause
_AGAIN_S = 0.5  # between two tries to meet an engine that was lost

_log = structlog.get_logger()
_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Notice)


class NixlFabric:
    """Memory for one engine's blocks, to be joined once. `block_bytes` 0: as few as tell blocks apart."""

    def __init__(self, blocks: int, block_bytes: int, *, timeout_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._blocks = blocks
        self._block_bytes = max(block_bytes, LEAST_BYTES)
        self._timeout_s = timeout_s
        self._clock = clock
        self.arena: Arena | None = None  # set when an engine joins

    def join(self, engine: str, member: Member) -> NixlEndpoint:
        """Register the memory and start an agent. Raises NixlUnavailable."""
        arena = self.arena = Arena(self._blocks, self._block_bytes)
        agent = Agent(engine, arena, timeout_s=self._timeout_s)
        return NixlEndpoint(agent, Contents(arena), member, clock=self._clock)


class PostedTransfer:
    def __init__(self, transfer: NixlTransfer) -> None:
        self._transfer = transfer

    @property
    def ended(self) -> bool:
        return self._transfer.state != "active"

    @property
    def failed(self) -> bool:
        return self._transfer.state == "failed"

    @property
    def settled(self) -> bool:
        return self._transfer.settled

    def finish(self) -> str:
        return self._transfer.error if self.ended else "the transfer has not ended"


class EndedTransfer:
    """A transfer that is over at once: there was nothing to move, or it could not even be begun."""

    ended = True
    settled = True

    def __init__(self, why: str = "") -> None:
        self.failed = bool(why)
        self._why = why

    def finish(self) -> str:
        return self._why


class NixlEndpoint:
    """The fabric's end in one engine. Knowledge from a peer that has left the pool is dropped with the peer."""

    def __init__(self, agent: Agent, contents: Contents, member: Member, *, clock: Callable[[], float]) -> None:
        self.engine = agent.name
        self.card = agent.card
        self._agent = agent
        self._contents = contents
        self._member = member
        self._clock = clock
        self._peers: dict[str, str] = {}  # engine by worker
        self._cards: dict[str, bytes] = {}  # by engine
        self._again_at: dict[str, float] = {}  # by lost engine: the time of the next try
        self._polled_at = 0.0
        self._still = 0  # polls in a row that moved nothing
        self._closed = False

    def leave(self) -> None:
        self._closed = True
        self._agent.close()

    # -- peers -----------------------------------------------------------------------------------------------

    def meet(self, peers: Mapping[str, bytes]) -> None:
        if self._closed:
            return
        there = {}
        for worker, card in peers.items():
            if card and (engine := self._introduce(card)) is not None:
                there[worker] = engine
        gone = set(self._peers.values()) | {engine for engine in self._cards if not self._agent.knows(engine)}
        for engine in gone - set(there.values()):
            self._cards.pop(engine, None)
            self._again_at.pop(engine, None)
            self._agent.forget(engine)
        self._peers = there

    def _introduce(self, card: bytes) -> str | None:
        """Meet the engine with this card, unless that is done. Returns None when an unknown card cannot be used."""
        known = next((engine for engine, other in self._cards.items() if other == card), None)
        if known is not None and (self._agent.knows(known) or self._clock() < self._again_at.get(known, 0.0)):
            return known
        try:
            engine = self._agent.meet(card)
        except (BadCard, TransferFailed) as error:
            STRANGE.labels("card").inc()
            _log.warning("peer.not_met", engine=self.engine, peer=known, reason=str(error))
            if known is not None:
                self._again_at[known] = self._clock() + _AGAIN_S
            return known
        self._cards[engine] = card
        hello = Notice(kind="renew", key="", sender=self.engine)  # renews nothing, but makes the connection now
        self._agent.notify(engine, _encoder.encode(hello))
        return engine

    def reaches(self, engine: str) -> bool:
        if self._closed:
            return False
        if self._agent.knows(engine):
            return True
        card = self._cards.get(engine)
        if card is not None:
            self._introduce(card)
        return self._agent.knows(engine)

    # -- own blocks ------------------------------------------------------------------------------------------

    def stamp(self, blocks: Sequence[int], cells: Sequence[int]) -> None:
        for block, cell in zip(blocks, cells, strict=True):
            self._contents.stamp(block, cell)

    def overwritten(self, blocks: Sequence[int]) -> None:
        for block in blocks:
            self._contents.overwrite(block)

    def content(self, blocks: Sequence[int]) -> list[int] | None:
        cells = [self._contents.read(block) for block in blocks]
        broken = cells.count(None)
        if broken:
            BROKEN.inc(broken)
            _log.error("blocks.broken", engine=self.engine, broken=broken, blocks=len(blocks))
            return None
        return [cell for cell in cells if cell is not None]

    # -- to others -------------------------------------------------------------------------------------------

    def read(self, engine: str, remote: Sequence[int], local: Sequence[int]) -> Transfer:
        self._contents.expect(local)
        return self._begin(lambda: self._agent.read(engine, remote, local)) if local else EndedTransfer()

    def write(self, engine: str, local: Sequence[int], remote: Sequence[int]) -> Transfer:
        return self._begin(lambda: self._agent.write(engine, local, remote)) if local else EndedTransfer()

    def _begin(self, begin: Callable[[], NixlTransfer]) -> Transfer:
        self._still = 0
        try:
            return PostedTransfer(begin())
        except (BadBlocks, TransferFailed) as error:
            return EndedTransfer(str(error))

    def notify(self, engine: str, notice: Notice) -> bool:
        if self._closed or not self.reaches(engine):
            return False
        if notice.kind == "register":
            self._contents.expect(notice.blocks)
            notice = msgspec.structs.replace(notice, card=self.card)
        return self._agent.notify(engine, _encoder.encode(notice))

    # -- from others -----------------------------------------------------------------------------------------

    def poll(self) -> bool:
        now = self._clock()
        if self._closed or (now - self._polled_at < _MOVING_S and not self._moving):
            return False
        began = time.perf_counter()  # the event loop's clock may stand still meanwhile
        ended, notices = self._agent.poll()
        took_s = time.perf_counter() - began
        self._polled_at = now + took_s
        self._still = 0 if notices or took_s >= _STILL_S else self._still + 1
        for sender, data in notices:
            self._receive(sender, data)
        return bool(ended or notices)

    @property
    def _moving(self) -> bool:
        """True while transfers are active and polling helps them on."""
        return self._agent.active > 0 and self._still < _MOST_STILL

    def poll_at(self, *, busy: bool) -> float | None:
        if self._closed:
            return None
        if self._moving:
            return self._polled_at
        if self._agent.active:
            return self._polled_at + _MOVING_S
        return self._polled_at + (_BUSY_S if busy or self._agent.unsettled else _IDLE_S)

    def _receive(self, sender: str, data: bytes) -> None:
        try:
            notice = _decoder.decode(data)
        except msgspec.DecodeError as error:
            STRANGE.labels("notice").inc()
            _log.warning("notice.unreadable", engine=self.engine, peer=sender, reason=str(error))
            return
        if notice.card and not self._agent.knows(sender):
            self._introduce(notice.card)
        self._member.notice(msgspec.structs.replace(notice, sender=sender))
