"""Images, videos and sounds in prompts, and the blocks (and so the answers) that they change."""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from hashlib import blake2b
from typing import Annotated, Any, Literal

import msgspec

from headrace.broker.blocks import MediaSpan, block_chain, chain_seed, extend_chain
from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.models.cards import MediaSlot
from headrace.workers.engine import Output, StoredTensor
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.answers import answer_to
from headrace.workers.sim.blocks import BlockManager, Content, fingerprint
from headrace.workers.sim.settings import NEVER, SequenceFaults, SimSettings
from headrace.workers.sim.tokens import Vocabulary
from headrace.workers.tokens import TokenTable

MEDIA_KINDS = ("image", "video", "audio")
PLACEHOLDERS = {"image": "<filename>", "video": "<file_sep>", "audio": "<empty_output>"}
"""Special tokens of the bundled tokenizer that no chat has in it: stand-ins for those of a model made for media."""


class _Item(msgspec.Struct, frozen=True, kw_only=True):
    kind: Literal["image", "video", "audio"]
    digest: int
    start: Annotated[int, msgspec.Meta(ge=0)]
    length: Annotated[int, msgspec.Meta(ge=1)]


def parse_media(items: Sequence[Mapping[str, Any]], prompt_tokens: int) -> tuple[MediaSpan, ...]:
    """Read the items of a prompt: `kind`, `digest` (u64 of the content), and `start` and `length` of the placeholder tokens.

    Further fields are ignored.  Raises RequestInvalid when one is missing or wrong, or an item lies outside of the prompt.
    """
    spans = []
    for number, given in enumerate(items):
        try:
            item = msgspec.convert(given, _Item)
        except msgspec.ValidationError as error:
            raise RequestInvalid(f"media item {number}: {error}", param="media") from None
        if not 0 <= item.digest < 1 << 64:
            raise RequestInvalid(f"media item {number}: digest {item.digest} is not an unsigned 64-bit number", param="media")
        if item.start + item.length > prompt_tokens:
            raise RequestInvalid(
                f"media item {number}: tokens {item.start} to {item.start + item.length} of a prompt of {prompt_tokens}",
                param="media",
            )
        spans.append(MediaSpan(item.start, item.length, item.digest))
    return tuple(spans)


def embeds_media(tensor: StoredTensor, prompt_tokens: int) -> tuple[MediaSpan, ...]:
    """Treat a prompt given as embeddings like an item that takes up the whole prompt."""
    if tensor.shape[0] != prompt_tokens:
        raise RequestInvalid(f"prompt_embeds has {tensor.shape[0]} rows for {prompt_tokens} tokens", param="prompt_embeds")
    digest = int.from_bytes(blake2b(tensor.data, person=tensor.dtype.encode(), digest_size=8).digest(), "little")
    return (MediaSpan(0, prompt_tokens, digest),)


def media_keys(spans: Sequence[MediaSpan], start: int, size: int) -> tuple[tuple[int, int], ...]:
    """Return (digest, offset) of each item that touches the block of `size` tokens at `start`; see `headrace.broker.blocks`."""
    return tuple(
        (span.digest, max(0, span.start - start))
        for span in spans
        if span.start < start + size and span.start + span.length > start
    )


def media_slots(table: TokenTable, tokens: int) -> dict[str, MediaSlot]:
    """Describe items in prompts: `tokens` each, of the kinds whose placeholder the tokenizer knows; with 0 there are none."""
    ids = {table.token_bytes(token): token for token in table.special} if tokens else {}
    known = {kind: ids.get(text.encode()) for kind, text in PLACEHOLDERS.items()}
    return {kind: MediaSlot(PLACEHOLDERS[kind], token, tokens) for kind, token in known.items() if token is not None}


class KvOffer(msgspec.Struct, frozen=True, kw_only=True):
    """The parameters of a params-style hand-over, opaque to all but the decode side. Times are Unix seconds."""

    engine: str
    request: str
    number: int  # sequence number among this engine's offers
    blocks: list[int]
    tokens: int
    chain: list[int]  # chain values of the whole blocks; they identify the prompt
    layout: str  # engines whose layouts differ cannot read each other
    mode: Literal["pull", "push"]
    cached_tokens: int
    issued_at: float
    ttl_s: float
    expires_at: float


@dataclass(frozen=True, slots=True)
class Side:
    """A sequence's part in a hand-over. `key` names the hand-over on both sides; `peer` is where a decode side fetches.

    A prefill side that reads a lent prefix is a decode side until it has come, and `then` what it is afterwards.
    """

    kind: Literal["prefill", "decode"]
    key: str
    room: bool = False
    offer: KvOffer | None = None
    peer: str = ""
    then: Side | None = None

    @property
    def number(self) -> int:
        """The offer's number, 0 without an offer."""
        return self.offer.number if self.offer is not None else 0

    @property
    def pulls(self) -> bool:
        """True for a decode side that reads the blocks itself."""
        return self.offer is not None and self.offer.mode == "pull"


class Phase(Enum):
    WAITING = auto()
    LOADING = auto()  # blocks come from another tier or engine
    PREFILL = auto()
    DECODE = auto()
    STUCK = auto()
    PARKED = auto()  # has computed its prompt and waits to hand it over
    GONE = auto()


class SequenceRun:
    """A sequence and its progress.

    `ids` are all its tokens, `index` the number of the next answer token and `computed` how many tokens the cache holds; a
    decoding sequence has all of its tokens there but the last, which is why `computed` is not kept up while it decodes.
    Before `special_at`, tokens need no special handling and the scheduler takes them from `stream` directly.
    """

    __slots__ = (
        "_answer", "_block_size", "_chain", "_end", "_eos", "_eos_at", "_logprobs", "_mean_tokens", "_min_index",
        "_sequence", "_start", "_stop_ids", "_vocabulary", "adapter", "blocks", "cached_tokens", "capacity", "committed",
        "computed", "expected", "extra", "fault_at", "faults", "id", "ids", "index", "media", "phase", "prompt_tokens",
        "rank", "reported", "salt", "side", "special_at", "stream", "taint",
    )  # fmt: skip

    def __init__(
        self, sequence: EngineSequence, faults: SequenceFaults, *, settings: SimSettings, vocabulary: Vocabulary, number: int
    ) -> None:
        sampling = sequence.sampling
        length = len(sequence.token_ids)
        start = length - sequence.prompt_tokens
        self.id = sequence.id
        self.ids = list(sequence.token_ids)
        self.rank = (sequence.priority, number)
        self.adapter = sequence.adapter
        self.salt = sequence.cache_salt
        self.faults = faults
        self.fault_at = faults.next_at(start)  # number of an answer token, as `_eos_at`; `NEVER` if there is none
        self.phase = Phase.WAITING
        self.blocks: list[int] = []
        self.capacity = 0  # tokens that `blocks` hold
        self.committed = 0  # tokens in blocks that other sequences can use
        self.computed = 0
        self.expected = 0  # tokens that the cache had when the sequence was queued
        self.cached_tokens: int | None = None  # set at the first admission
        self.extra: Mapping[str, Any] | None = None  # the output's `extra` that goes with `cached_tokens`
        self.reported = False  # `cached_tokens` and `extra` are in an output
        self.index = start
        self.prompt_tokens = sequence.prompt_tokens
        self.media = parse_media(sequence.media, sequence.prompt_tokens) if sequence.media else ()
        if sequence.prompt_embeds is not None:
            self.media = embeds_media(sequence.prompt_embeds, sequence.prompt_tokens)
        self.side: Side | None = None
        self.taint = 0
        self._start = start
        self._block_size = settings.block_size
        self._chain: list[int] | None = None
        self._vocabulary = vocabulary
        self._sequence = sequence
        self._mean_tokens = settings.mean_output_tokens or None
        self._draw()
        room = settings.context_length - length
        self._end = start + (room if sampling.max_tokens is None else min(room, sampling.max_tokens))
        self._min_index = start + sampling.min_tokens
        self._eos = vocabulary.eos
        self._eos_at = self._end_of_answer()
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._logprobs = sequence.logprobs
        self.special_at = 0  # the first token, which brings what is reported once

    def __lt__(self, other: SequenceRun) -> bool:
        return self.rank < other.rank

    def _draw(self) -> None:
        self._answer = answer_to(
            self._sequence, self._vocabulary, mean_tokens=self._mean_tokens, media=self.media, taint=self.taint
        )
        self.stream = self._answer.ids

    def _end_of_answer(self) -> int:
        answer = self._answer
        if answer.eos_at is None:
            return NEVER
        return answer.eos_at if answer.closed else max(answer.eos_at, self._min_index)

    def set_taint(self, taint: int) -> None:
        """Answer from here on like an engine whose cache holds what `taint` stands for (0: the right content)."""
        if taint != self.taint:
            self.taint = taint
            self._draw()
            self._eos_at = self._end_of_answer()
            self._look_ahead()

    def set_side(self, side: Side) -> None:
        """Give this sequence its part in a hand-over. A prefill side emits one token."""
        self.side = side
        if side.kind == "prefill" or side.then is not None:
            self._end = self.index + 1
            self._look_ahead()

    def has_fault(self, name: Literal["peer_dead", "transfer_breaks", "stall_transfer"]) -> bool:
        wanted: bool = getattr(self.faults, name)
        return wanted and not (self.faults.fresh_only and self._start)

    def chain(self) -> list[int]:
        """Return the chain values of all whole blocks of `ids`. The list is shared: do not change it."""
        size = self._block_size
        if self._chain is None:
            self._chain = block_chain(self.ids, size, adapter=self.adapter, salt=self.salt, media=self.media)
        chain = self._chain
        for n in range(len(chain), len(self.ids) // size):
            end = (n + 1) * size
            if self.media and media_keys(self.media, n * size, size):  # an item reached into the prompt's last, partial block
                value = block_chain(self.ids[:end], size, adapter=self.adapter, salt=self.salt, media=self.media)[-1]
            else:
                parent = chain[-1] if chain else chain_seed(self.adapter, self.salt)
                value = extend_chain(parent, self.ids[n * size : end])
            chain.append(value)
        return chain

    def contents(self, chain: list[int], start: int, end: int) -> list[Content]:
        """Describe the whole blocks from number `start` to before `end` as the cache keeps them. `chain` has all of them."""
        size = self._block_size
        return [
            Content(
                chain[n],
                chain[n - 1] if n else None,
                tuple(self.ids[n * size : (n + 1) * size]),
                self.adapter,
                self.salt,
                media_keys(self.media, n * size, size) if self.media else (),
                self.taint,
            )
            for n in range(start, end)
        ]

    def cells(self, tokens: int) -> list[int]:
        """Return the correct contents of the blocks of the first `tokens` tokens, including a partial last one."""
        size = self._block_size
        whole, rest = divmod(tokens, size)
        cells = self.chain()[:whole]
        if rest:
            start = whole * size
            parent = cells[-1] if cells else chain_seed(self.adapter, self.salt)
            cells.append(fingerprint(parent, self.ids[start:tokens], media_keys(self.media, start, rest)))
        return cells

    def emit(self) -> Output:
        index = self.index
        while index >= len(self.stream):
            self._answer.grow()
        token = self.stream[index]
        output = Output(self.id, [token])
        if index == self._eos_at and self._eos is not None:
            token = self._eos
            output.ids[0] = token
            output.finish = "stop"
        elif index >= self._min_index and token in self._stop_ids:
            output.finish, output.stop = "stop", token
        elif index + 1 >= self._end:
            output.finish = "length"
        if self._logprobs is not None:
            output.logprobs = [self._answer.logprob(index, token, self._logprobs)]
        if not self.reported:
            output.cached_tokens, output.extra, self.reported = self.cached_tokens, self.extra, True
            output.prompt_logprobs = self._prompt_logprobs()
        self.ids.append(token)
        self.index = index + 1
        if output.finish is None:
            self._look_ahead()
        return output

    def _prompt_logprobs(self) -> list[TokenLogprob | None] | None:
        top = self._sequence.prompt_logprobs
        if top is None:
            return None
        score = self._answer.prompt_logprob
        return [None, *(score(n, self.ids[n], top) for n in range(1, self.prompt_tokens))]

    def _look_ahead(self) -> None:
        """Set `special_at`: the next token number that `emit` must handle."""
        every = self._stop_ids or self._logprobs is not None
        self.special_at = 0 if every else min(len(self.stream), self._end - 1, self._eos_at, self.fault_at)


class WaitingQueue:
    """A priority queue of sequences. Entries of sequences that have left are skipped."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], SequenceRun]] = []
        self.count = 0

    def push(self, run: SequenceRun) -> None:
        run.phase = Phase.WAITING
        heapq.heappush(self._heap, (run.rank, run))
        self.count += 1

    def first(self) -> SequenceRun | None:
        """Return the sequence to be admitted next, without removing it."""
        while self._heap:
            run = self._heap[0][1]
            if run.phase is Phase.WAITING:
                return run
            heapq.heappop(self._heap)
        return None

    def pop(self) -> None:
        """Remove the sequence that `first` returned."""
        heapq.heappop(self._heap)
        self.count -= 1

    def leave(self) -> None:
        """Note that a waiting sequence has left; its phase marks its entry."""
        self.count -= 1


_STARTED = (Phase.LOADING, Phase.PREFILL)


class EngineBatch:
    """The sequences of one engine by phase. A sequence that hands over in a room (`PARKED`) is only in `runs`."""

    def __init__(self, manager: BlockManager) -> None:
        self.manager = manager
        self.runs: dict[str, SequenceRun] = {}
        self.waiting = WaitingQueue()
        self.loading: list[SequenceRun] = []
        self.prefilling: list[SequenceRun] = []
        self.decoding: list[SequenceRun] = []
        self.stuck: list[SequenceRun] = []
        self.queued_tokens = 0  # tokens to be computed or loaded for sequences that do not decode yet
        self.preemptions = 0

    @property
    def running(self) -> int:
        return len(self.prefilling) + len(self.decoding) + len(self.stuck) + len(self.loading)

    def wait(self, run: SequenceRun) -> None:
        """Queue a sequence, new or preempted. The tokens that the cache has now are expected to be there at its admission."""
        self.waiting.push(run)
        size = self.manager.block_size
        run.expected = size * self.manager.known(run.chain()[: (len(run.ids) - 1) // size])
        self.queued_tokens += len(run.ids) - run.expected

    def start(self, run: SequenceRun, blocks: list[int]) -> None:
        """Give the first waiting sequence a slot, with these blocks of prefix; the caller sets its phase."""
        cached = len(blocks) * self.manager.block_size
        self.waiting.pop()
        run.blocks, run.capacity, run.committed = blocks, cached, cached
        run.computed = cached
        self.queued_tokens += run.expected - cached
        taint = self.manager.taint(blocks)
        if taint != run.taint:
            run.set_taint(taint)

    def reach(self, run: SequenceRun, computed: int) -> None:
        """Note that the cache now holds this many of the sequence's tokens."""
        self.queued_tokens -= computed - run.computed
        run.computed = computed
        self.commit(run, computed)

    def prefill(self, run: SequenceRun) -> None:
        run.phase = Phase.PREFILL
        self.prefilling.append(run)

    def leave(self, run: SequenceRun) -> None:
        match run.phase:
            case Phase.PREFILL:
                self.prefilling.remove(run)
            case Phase.DECODE:
                self.decoding.remove(run)
            case Phase.STUCK:
                self.stuck.remove(run)
            case Phase.LOADING:
                self.loading.remove(run)
        self.manager.release(run.blocks)
        run.blocks, run.capacity, run.committed = [], 0, 0

    def drop(self, run: SequenceRun) -> None:
        self.queued_tokens -= self._remaining(run)
        if run.phase is Phase.WAITING:
            self.waiting.leave()
        self.leave(run)
        run.phase = Phase.GONE
        del self.runs[run.id]

    def _remaining(self, run: SequenceRun) -> int:
        if run.phase is Phase.WAITING:
            return len(run.ids) - run.expected
        return len(run.ids) - run.computed if run.phase in _STARTED else 0

    # -- blocks ----------------------------------------------------------------------------------------------

    def make_room(self, run: SequenceRun, count: int) -> bool:
        """Allocate blocks to a running sequence, preempting worse ones. Returns False if it was itself the worst."""
        while (blocks := self.manager.allocate(count)) is None:
            victim = max((*self.prefilling, *self.decoding), key=_rank)
            self._preempt(victim)
            if victim is run:
                return False
        run.blocks += blocks
        run.capacity += count * self.manager.block_size
        return True

    def _preempt(self, run: SequenceRun) -> None:
        self.preemptions += 1
        self.queued_tokens -= self._remaining(run)
        self.leave(run)
        run.computed = 0
        self.wait(run)

    def commit(self, run: SequenceRun, computed: int) -> None:
        """Make the blocks that are full after `computed` tokens available to others."""
        size = self.manager.block_size
        start, end = run.committed // size, computed // size
        if end <= start:
            return
        chain = run.chain()
        if run.taint or self.manager.known(chain[start:end]) < end - start:  # else an equal answer is cached already
            self.manager.commit(run.blocks[start:end], run.contents(chain, start, end))
        run.committed = end * size


def _rank(run: SequenceRun) -> tuple[int, int]:
    return run.rank
