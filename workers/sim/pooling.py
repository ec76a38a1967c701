"""Vectors that the simulator computes for an input, as a pure function of its token ids.

Every token id stands for a direction, drawn from its number. An embedding is the sum of the directions of all tokens, a token
that occurs more often weighing more.  So texts that share tokens are more alike than texts that do not, and the order of tokens
does not matter.  Special tokens stand in every text and count for nothing.  Scores and classes are computed from embeddings.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import Literal

import msgspec
import numpy as np
from numpy.typing import NDArray

from headrace.broker.messages.requests import Sampling
from headrace.workers.engine import Output, Pooled, PoolItem
from headrace.workers.engine import Sequence as EngineSequence
from headrace.workers.errors import EngineDead, EngineError, RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.settings import SimSettings

_STEEPNESS = 6.0  # logits between a likeness of 1 and one of 0
_MIDDLE = 0.35  # the likeness of a pair whose score is 1/2

Vector = NDArray[np.float64]


def embedding(ids: Sequence[int], size: int, *, special: Collection[int] = ()) -> Vector:
    """Add up the directions of these tokens. The result is never all zero."""
    counted = [token for token in ids if token not in special] or list(ids)
    tokens, counts = np.unique(np.asarray(counted, dtype=np.uint64), return_counts=True)
    vector: Vector = (1.0 + np.log(counts)) @ _directions(tokens, size)
    return vector if np.any(vector) else _directions(tokens[:1], size)[0]


def unit(vector: Vector) -> Vector:
    return vector / np.linalg.norm(vector)


def pair_logit(ids: Sequence[int], second: int, size: int, *, special: Collection[int] = ()) -> float:
    """Score how well the text from `second` on fits the text before it."""
    likeness = unit(embedding(ids[:second], size, special=special)) @ unit(embedding(ids[second:], size, special=special))
    return _STEEPNESS * (float(likeness) - _MIDDLE)


def class_logits(ids: Sequence[int], classes: int, size: int, *, special: Collection[int] = ()) -> Vector:
    """Score the text against the direction of each class; one number per class."""
    numbers = np.arange(1, classes + 1, dtype=np.uint64) << np.uint64(40)  # no token has such a number
    return _STEEPNESS * (_unit_rows(_directions(numbers, size)) @ unit(embedding(ids, size, special=special)))


def softmax(logits: Vector) -> Vector:
    powers = np.exp(logits - logits.max())
    total: Vector = powers / powers.sum()
    return total


def sigmoid(logit: float) -> float:
    return float(1.0 / (1.0 + np.exp(-logit)))


def _unit_rows(rows: Vector) -> Vector:
    scaled: Vector = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    return scaled


def _directions(numbers: NDArray[np.uint64], size: int) -> Vector:
    """Draw a row per number, with entries between -1 and 1: splitmix64 of the number and the place."""
    with np.errstate(over="ignore"):
        places = np.arange(1, size + 1, dtype=np.uint64)
        mixed = (numbers[:, None] * np.uint64(0xD1342543DE82EF95) + places[None, :]) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        mixed ^= mixed >> np.uint64(31)
    return (mixed >> np.uint64(11)).astype(np.float64) / float(1 << 52) - 1.0


# The simulator as a pooling engine: an input takes the time and the blocks of its prefill, then its vector is returned.
#
# Inside, an input is a sequence of one token that is never sent, so that batching, chunks of long inputs, waiting and
# injected faults are those of every other sequence. The prefix cache is not used: an encoder cannot use a prefix.

Serves = Literal["embed", "score", "classify"]

KINDS: dict[Serves, tuple[str, ...]] = {"embed": ("embedding",), "score": ("score",), "classify": ("classify",)}


class SimPooling:
    """The pooling inputs inside one simulator, and the callers that wait for them."""

    def __init__(self, serves: Serves, settings: SimSettings, *, special: frozenset[int]) -> None:
        self._serves = serves
        self._size = settings.vector_size
        self._classes = settings.classes
        self._special = special
        self._waiting: dict[str, asyncio.Future[None]] = {}

    @property
    def kinds(self) -> tuple[str, ...]:
        return KINDS[self._serves]

    @property
    def labels(self) -> tuple[str, ...]:
        return tuple(f"class-{i}" for i in range(self._classes)) if self._serves == "classify" else ()

    @staticmethod
    def scheduler_settings(settings: SimSettings) -> SimSettings:
        """Return settings with room for the token that is never sent, which follows even an input of full length."""
        return msgspec.structs.replace(settings, context_length=settings.context_length + 1, blocks=settings.blocks + 1)

    async def pool(
        self, item: PoolItem, *, submit: Callable[[EngineSequence], Awaitable[None]], abort: Callable[[list[str]], None]
    ) -> Pooled:
        """Compute the vector of an input.

        Raises the errors of `submit`, RequestInvalid, UnsupportedByEngine, EngineDead and EngineError.
        """
        self._check(item)
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting[item.id] = done
        try:
            await submit(_sequence(item))
            await done
        except asyncio.CancelledError:
            abort([item.id])
            raise
        finally:
            self._waiting.pop(item.id, None)
        return Pooled(self._vector(item))

    def settle(self, outputs: list[Output]) -> None:
        """Settle the inputs that ended in a step. `outputs` are the step's outputs, all of pooling inputs."""
        for output in outputs:
            done = self._waiting.get(output.id)
            if done is None or done.done():
                continue
            if output.fault is not None:
                error = EngineError(output.fault.message)
                error.retriable = output.fault.retriable
                done.set_exception(error)
            elif output.finish is not None:
                done.set_result(None)

    def died(self, reason: str) -> None:
        for done in self._waiting.values():
            if not done.done():
                done.set_exception(EngineDead(f"the simulator is dead: {reason}"))

    def _check(self, item: PoolItem) -> None:
        if (item.task == "embed") != (self._serves == "embed"):
            raise UnsupportedByEngine(f"this simulator was started to {self._serves}")
        if item.dimensions is not None:
            if self._serves != "embed":
                raise RequestInvalid("dimensions are of embeddings", param="dimensions")
            if item.dimensions > self._size:
                raise RequestInvalid(
                    f"dimensions must be at most {self._size}, this request has {item.dimensions}", param="dimensions"
                )

    def _vector(self, item: PoolItem) -> bytes:
        ids, plain = item.token_ids, item.normalize is False
        if self._serves == "embed":
            vector = embedding(ids, self._size, special=self._special)[: item.dimensions]
            made = vector if plain else unit(vector)
        elif self._serves == "score" and item.second:
            logit = pair_logit(ids, item.second, self._size, special=self._special)
            made = np.array([logit if plain else sigmoid(logit)])
        else:
            classes = 1 if self._serves == "score" else self._classes
            logits = class_logits(ids, classes, self._size, special=self._special)
            if classes == 1:
                made = logits if plain else np.array([sigmoid(float(logits[0]))])
            else:
                made = logits if plain else softmax(logits)
        return made.astype("<f4").tobytes()


def _sequence(item: PoolItem) -> EngineSequence:
    return EngineSequence(
        id=item.id,
        token_ids=item.token_ids,
        prompt_tokens=len(item.token_ids),
        sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),
        cache_salt=item.id,
        priority=item.priority,
        adapter=item.adapter,
        extra=item.extra,
    )
