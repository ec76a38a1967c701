"""A frontend with one embedding, one pair-scoring, one classifying and one chat model, whose workers are scripts."""

from __future__ import annotations

import base64
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import msgspec
from tokenizers import Tokenizer

from headrace.broker.codec import unpack_u32
from headrace.broker.jobs import Job
from headrace.broker.messages.frames import Finish, Row
from headrace.broker.messages.requests import PoolingInput
from tests.support.frontend.fakes import CARD, FILES, MODEL, TOKENIZER, Call, FakeIngress, FakeServed, Step, frontend, post

EMBEDDER, SCORER, CLASSIFIER = "org/embedder", "org/scorer", "org/classifier"


def bert_tokenizer() -> bytes:
    """One token per byte, as in the fakes, with [CLS] 257 before a text and [SEP] 258 behind each; token types 0 and 1."""
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_str(TOKENIZER.decode())
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 257), ("[SEP]", 258)]
    )
    return str(tokenizer.to_str()).encode()


BERT = {"tokenizer.json": bert_tokenizer()}
CLS, SEP = 257, 258
VECTORS = Callable[[PoolingInput], Sequence[float]]


def card(name: str, kind: str, **more: Any) -> FakeServed:
    changed = msgspec.structs.replace(
        CARD, model=name, pool=name.replace("/", "-"), aliases=[], kinds=[kind], vocab_size=259, context_length=32, **more
    )
    return FakeServed(changed, BERT)


def packed(numbers: Sequence[float]) -> bytes:
    return array("f", numbers).tobytes()


def pooled(vectors: VECTORS) -> Callable[[Job], Iterable[Step]]:
    """A worker that ends input after input, the last one first."""

    def script(job: Job) -> Iterable[Step]:
        assert job.pooling is not None
        for choice, given in reversed(list(enumerate(job.pooling.inputs))):
            tokens = len(unpack_u32(given.token_ids))
            fin = Finish(reason="stop", prompt_tokens=tokens, vector=packed(vectors(given)))
            yield [Row(job.id, 1, 7, choice, 0, [], [], None, fin)]
        yield []

    return script


def lengths(given: PoolingInput) -> list[float]:
    """A vector that tells which input it is of."""
    return [float(len(given.token_ids) // 4), 1.0]


class Bench:
    def __init__(self, vectors: VECTORS = lengths, **settings: Any) -> None:
        self.ingress = FakeIngress(pooled(vectors))
        self.ingress.models.served = {
            MODEL: FakeServed(CARD, FILES),
            EMBEDDER: card(EMBEDDER, "embedding"),
            SCORER: card(SCORER, "score"),
            CLASSIFIER: card(CLASSIFIER, "classify", labels=["good", "bad"]),
        }
        self.frontend = frontend(self.ingress, **settings)

    async def post(self, path: str, body: Any, **more: Any) -> Call:
        return await post(self.frontend.app, body, path, **more)

    @property
    def jobs(self) -> list[Job]:
        return self.ingress.jobs

    def ids(self, job: int = 0) -> list[list[int]]:
        pooling = self.jobs[job].pooling
        assert pooling is not None
        return [unpack_u32(given.token_ids) for given in pooling.inputs]


def unbase64(text: str) -> list[float]:
    values = array("f")
    values.frombytes(base64.b64decode(text))
    return values.tolist()


__all__ = ["BERT", "CLASSIFIER", "CLS", "EMBEDDER", "MODEL", "SCORER", "SEP", "Bench", "lengths", "packed", "unbase64"]
