"""Writes vectors as the answers of the pooling APIs.

Vectors are collected as they arrive. The JSON is made at the end, in a thread if it is large, and one vector at a time: the
encoder never releases the interpreter, so a single call for millions of numbers would block the event loop from any thread.
"""

from __future__ import annotations

import binascii
import math
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from operator import mul

import msgspec

from headrace.broker.codec import unpack_f32
from headrace.broker.messages.frames import Row
from headrace.frontend.answer_schema import UNSET
from headrace.frontend.errors import FrontendError
from headrace.frontend.generation.sse import Head, UsageCounter, WholeWriter
from headrace.frontend.pooling.schema import (
    ClassData,
    PoolingUsage,
    Ranked,
    RankedDocument,
    RerankAnswer,
    RerankUsage,
    Score,
    ScoreAnswer,
)
from headrace.frontend.prompts.prompt_encoder import PromptEncoder

# Decodes the vectors of workers: f32, little endian.


class BadVector(FrontendError, status=502, code="engine_error", retriable=True):
    """The engine gave a vector that has no meaning."""


def floats(vector: bytes) -> list[float]:
    """Return the numbers of a vector. Raises BadVector if it is empty, truncated or not finite, which JSON cannot express."""
    if not vector or len(vector) % 4:
        raise BadVector(f"the engine gave a vector of {len(vector)} bytes")
    numbers = unpack_f32(vector)
    if not math.isfinite(sum(numbers)):
        raise BadVector("the engine gave a vector with numbers that are not finite")
    return numbers


def cosine(a: Sequence[float], b: Sequence[float]) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    length = math.sqrt(sum(map(mul, a, a))) * math.sqrt(sum(map(mul, b, b)))
    return sum(map(mul, a, b)) / length if length else 0.0


_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True, kw_only=True)
class VectorAnswer:
    """The inputs of every pooling writer. Writers use the threads of `encoder`."""

    head: Head
    counter: UsageCounter
    inputs: int
    encoder: PromptEncoder


class VectorWriter(WholeWriter):
    """Base of the writers: collects the vectors of all inputs, in the order of the inputs."""

    def __init__(self, answer: VectorAnswer) -> None:
        self.open = answer.inputs
        self.unsettled = True
        self.vectors: list[bytes] = [b""] * answer.inputs
        self._answer = answer
        self._numbers = 0
        self._body = b""

    def take(self, rows: list[Row]) -> None:
        for row in rows:
            fin = row.fin
            if fin is not None:
                self._numbers += len(fin.vector) // 4
                self.vectors[row.choice] = fin.vector
                self._answer.counter.end(row.choice, fin)
                self.open -= 1

    async def settle(self) -> None:
        """Make the body. Raises BadVector."""
        self._body = await self._answer.encoder.aside(self.make, size=self._numbers)

    def body(self) -> bytes:
        return self._body

    @abstractmethod
    def make(self) -> bytes:
        """Return the JSON of the whole answer. May be called in any thread. Raises BadVector."""

    @property
    def head(self) -> Head:
        return self._answer.head

    def usage(self) -> PoolingUsage:
        tokens = self._answer.counter.prompt
        return PoolingUsage(prompt_tokens=tokens, total_tokens=tokens)

    def listing(self, entries: Iterator[bytes]) -> bytes:
        """Return a list object around entries that are JSON already."""
        head = self.head
        parts = [
            b'{"id":%b,"object":"list","created":%d,"model":%b,"data":['
            % (_encode(head.id), head.created, _encode(head.model)),
            b",".join(entries),
            b'],"usage":%b}' % _encode(self.usage()),
        ]
        return b"".join(parts)


class EmbeddingWriter(VectorWriter):
    def __init__(self, answer: VectorAnswer, *, base64: bool, kind: str = "embedding", field: str = "embedding") -> None:
        super().__init__(answer)
        self._base64 = base64
        self._names = (kind.encode(), field.encode())

    def make(self) -> bytes:
        return self.listing(self._entries())

    def _entries(self) -> Iterator[bytes]:
        kind, field = self._names
        for index, vector in enumerate(self.vectors):
            numbers = floats(vector)
            shown = b'"%b"' % binascii.b2a_base64(vector, newline=False) if self._base64 else _encode(numbers)
            yield b'{"index":%d,"object":"%b","%b":%b}' % (index, kind, field, shown)


class ClassifyWriter(VectorWriter):
    """Writes the response of `/v1/classify`. `labels` may be empty."""

    def __init__(self, answer: VectorAnswer, *, labels: Sequence[str]) -> None:
        super().__init__(answer)
        self._labels = labels

    def make(self) -> bytes:
        return self.listing(self._entries())

    def _entries(self) -> Iterator[bytes]:
        for index, vector in enumerate(self.vectors):
            probs = floats(vector)
            best = probs.index(max(probs))
            label = self._labels[best] if best < len(self._labels) else None
            yield _encode(ClassData(index=index, label=label, probs=probs, num_classes=len(probs)))


class ScoringWriter(VectorWriter):
    """Base of the writers with one score per pair.

    With `queries` None, every vector is the score of a pair. Otherwise the vectors are embeddings, the first `queries` of them
    of first texts. A single first text is compared with all second texts.
    """

    def __init__(self, answer: VectorAnswer, *, queries: int | None) -> None:
        super().__init__(answer)
        self._queries = queries

    def scores(self) -> list[float]:
        """Return the scores of all pairs. Raises BadVector."""
        if self._queries is None:
            return [floats(vector)[0] for vector in self.vectors]
        first = [floats(vector) for vector in self.vectors[: self._queries]]
        second = self.vectors[self._queries :]
        return [cosine(first[i if len(first) > 1 else 0], floats(vector)) for i, vector in enumerate(second)]


class ScoreWriter(ScoringWriter):
    def make(self) -> bytes:
        head = self.head
        data = [Score(index=i, score=score) for i, score in enumerate(self.scores())]
        return _encode(ScoreAnswer(id=head.id, created=head.created, model=head.model, data=data, usage=self.usage()))


class RerankWriter(ScoringWriter):
    """Writes the response of `/v1/rerank`: best first, ties in the order of the request."""

    def __init__(
        self, answer: VectorAnswer, *, queries: int | None, documents: Sequence[str], most: int, with_documents: bool
    ) -> None:
        """`most` is the number of results; 0 = all."""
        super().__init__(answer, queries=queries)
        self._documents = documents
        self._most = most or len(documents)
        self._with_documents = with_documents

    def make(self) -> bytes:
        scores = self.scores()
        order = sorted(range(len(scores)), key=scores.__getitem__, reverse=True)[: self._most]
        results = [
            Ranked(
                index=i,
                document=RankedDocument(text=self._documents[i]) if self._with_documents else UNSET,
                relevance_score=scores[i],
            )
            for i in order
        ]
        usage = self.usage()
        rerank_usage = RerankUsage(prompt_tokens=usage.prompt_tokens, total_tokens=usage.total_tokens)
        return _encode(RerankAnswer(id=self.head.id, model=self.head.model, usage=rerank_usage, results=results))
