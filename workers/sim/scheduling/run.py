"""The state of a sequence inside the simulated engine."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum, auto
from typing import Any, Literal

from headrace.broker.blocks import block_chain, chain_seed, extend_chain
from headrace.broker.messages import TokenLogprob
from headrace.workers.engine import Output, Sequence
from headrace.workers.sim.answers.answers import answer_to
from headrace.workers.sim.answers.tokens import Vocabulary
from headrace.workers.sim.faults import SequenceFaults
from headrace.workers.sim.media import embeds_media, media_keys, parse_media
from headrace.workers.sim.scheduling.handover_side import Side
from headrace.workers.sim.scheduling.tiers import Content, fingerprint
from headrace.workers.sim.settings import SimSettings


class Phase(Enum):
    """The phase of a sequence."""

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
        "_answer",
        "_block_size",
        "_chain",
        "_end",
        "_eos",
        "_eos_at",
        "_logprobs",
        "_mean_tokens",
        "_min_index",
        "_sequence",
        "_start",
        "_stop_ids",
        "_vocabulary",
        "adapter",
        "blocks",
        "cached_tokens",
        "capacity",
        "committed",
        "computed",
        "expected",
        "extra",
        "fault_at",
        "faults",
        "id",
        "ids",
        "index",
        "media",
        "phase",
        "prompt_tokens",
        "rank",
        "reported",
        "salt",
        "side",
        "special_at",
        "stream",
        "taint",
    )

    def __init__(
        self, sequence: Sequence, faults: SequenceFaults, *, settings: SimSettings, vocabulary: Vocabulary, number: int
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
        self.fault_at = faults.next_at(start)
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
        self.special_at = 0
        self._look_ahead()

    def __lt__(self, other: SequenceRun) -> bool:
        return self.rank < other.rank

    def _draw(self) -> None:
        self._answer = answer_to(
            self._sequence, self._vocabulary, mean_tokens=self._mean_tokens, media=self.media, taint=self.taint
        )
        self.stream = self._answer.ids

    def _end_of_answer(self) -> int | None:
        answer = self._answer
        return answer.eos_at if answer.eos_at is None or answer.closed else max(answer.eos_at, self._min_index)

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
        """Return true when this fault is injected into this sequence."""
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

    def contents(self, start: int, end: int) -> list[Content]:
        """Describe the whole blocks from number `start` to before `end` as the cache keeps them."""
        size, chain = self._block_size, self.chain()
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
        """Emit the next token as an output, finished if it is the last."""
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
        if self._stop_ids or self._logprobs is not None:
            self.special_at = 0
            return
        marks = [len(self.stream), self._end - 1, self._eos_at, self.fault_at]
        self.special_at = min(mark for mark in marks if mark is not None)
