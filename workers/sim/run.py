"""One sequence inside the simulated engine."""

from __future__ import annotations

from enum import Enum, auto

from broker.blocks import block_chain, chain_seed, extend_chain
from workers.engine import Output, Sequence
from workers.sim.faults import SequenceFaults
from workers.sim.settings import SimSettings
from workers.sim.tokens import Answer, Vocabulary


class Phase(Enum):
    """Where a sequence is."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    STUCK = auto()
    GONE = auto()


class Run:
    """A sequence and how far it has come.

    `ids` are all its tokens, `index` the number of the next answer token and `computed` how many tokens the cache holds; a
    decoding sequence has all of its tokens there but the last, which is why `computed` is not kept up while it decodes.
    Up to `special_at` a token is just a token and the scheduler takes it from `stream` by itself.
    """

    __slots__ = (
        "_answer",
        "_block_size",
        "_chain",
        "_end",
        "_eos",
        "_eos_at",
        "_logprobs",
        "_min_index",
        "_stop_ids",
        "adapter",
        "blocks",
        "cached_tokens",
        "capacity",
        "committed",
        "computed",
        "fault_at",
        "faults",
        "id",
        "ids",
        "index",
        "phase",
        "rank",
        "reported",
        "salt",
        "special_at",
        "stream",
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
        self.committed = 0  # tokens in blocks that others can use
        self.computed = 0
        self.cached_tokens: int | None = None  # at the first admission
        self.reported = False  # `cached_tokens` is in an output
        self.index = start
        self._block_size = settings.block_size
        self._chain: list[int] | None = None
        self._answer = Answer(
            vocabulary,
            sequence.token_ids[: sequence.prompt_tokens],
            sampling=sampling,
            adapter=sequence.adapter,
            mean_tokens=settings.mean_output_tokens,
        )
        self.stream = self._answer.ids
        room = settings.context_length - length
        self._end = start + (room if sampling.max_tokens is None else min(room, sampling.max_tokens))
        self._min_index = start + sampling.min_tokens
        self._eos = vocabulary.eos
        self._eos_at = None if self._answer.eos_at is None else max(self._answer.eos_at, self._min_index)
        self._stop_ids = frozenset(sampling.stop_token_ids)
        self._logprobs = sequence.logprobs
        self.special_at = 0
        self._look_ahead()

    def __lt__(self, other: Run) -> bool:
        return self.rank < other.rank

    def chain(self) -> list[int]:
        """Chain values of all whole blocks of `ids`. The list is shared: do not change it."""
        size = self._block_size
        if self._chain is None:
            self._chain = block_chain(self.ids, size, adapter=self.adapter, salt=self.salt)
        chain = self._chain
        for n in range(len(chain), len(self.ids) // size):
            parent = chain[-1] if chain else chain_seed(self.adapter, self.salt)
            chain.append(extend_chain(parent, self.ids[n * size : (n + 1) * size]))
        return chain

    def emit(self) -> Output:
        """The next token as an output, finished if it is the last."""
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
            output.cached_tokens, self.reported = self.cached_tokens, True
        self.ids.append(token)
        self.index = index + 1
        self._look_ahead()
        return output

    def _look_ahead(self) -> None:
        """Set `special_at`: the next token number at which something may happen that `emit` must see to."""
        if self._stop_ids or self._logprobs is not None:
            self.special_at = 0
            return
        marks = [len(self.stream), self._end - 1, self._eos_at, self.fault_at]
        self.special_at = min(mark for mark in marks if mark is not None)
