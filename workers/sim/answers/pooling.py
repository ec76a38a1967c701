"""The simulator as a pooling engine: an input takes the time and the blocks of its prefill, then its vector is returned.

Inside, an input is a sequence of one token that is never sent, so that batching, chunks of long inputs, waiting and injected
faults are those of every other sequence.  The prefix cache is not used: an encoder cannot use a prefix.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Literal

import msgspec
import numpy as np

from headrace.broker.messages import Sampling
from headrace.workers.engine import Output, Pooled, PoolItem, Sequence
from headrace.workers.errors import EngineDead, EngineError, RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.answers import embeddings
from headrace.workers.sim.settings import SimSettings

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
        self, item: PoolItem, *, submit: Callable[[Sequence], Awaitable[None]], abort: Callable[[list[str]], None]
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
            vector = embeddings.embedding(ids, self._size, special=self._special)[: item.dimensions]
            made = vector if plain else embeddings.unit(vector)
        elif self._serves == "score" and item.second:
            logit = embeddings.pair_logit(ids, item.second, self._size, special=self._special)
            made = np.array([logit if plain else embeddings.sigmoid(logit)])
        else:
            classes = 1 if self._serves == "score" else self._classes
            logits = embeddings.class_logits(ids, classes, self._size, special=self._special)
            if classes == 1:
                made = logits if plain else np.array([embeddings.sigmoid(float(logits[0]))])
            else:
                made = logits if plain else embeddings.softmax(logits)
        return made.astype("<f4").tobytes()


def _sequence(item: PoolItem) -> Sequence:
    return Sequence(
        id=item.id,
        token_ids=item.token_ids,
        prompt_tokens=len(item.token_ids),
        sampling=Sampling(temperature=0.0, max_tokens=1, ignore_eos=True),
        cache_salt=item.id,
        priority=item.priority,
        adapter=item.adapter,
        extra=item.extra,
    )
