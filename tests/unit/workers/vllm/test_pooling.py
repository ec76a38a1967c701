"""vLLM as a pooling engine: what is told from files, and what becomes of its answers. No vLLM needed: it is imitated."""

from __future__ import annotations

import asyncio
import json
import sys
from array import array
from collections.abc import AsyncGenerator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.workers.engine import EngineConfig, PoolItem
from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.vllm.load_meter import LoadMeter
from headrace.workers.vllm.pooling import VllmPooling, class_labels, pooling_kinds, pools
from headrace.workers.vllm.settings import kv_events_wanted


def folder(path: Path, *, architecture: str | None = None, modules: Any = None, pooling: bool = False) -> str:
    if architecture is not None:
        (path / "config.json").write_text(json.dumps({"architectures": [architecture]}))
    if modules is not None:
        (path / "modules.json").write_text(json.dumps(modules))
    if pooling:
        (path / "1_Pooling").mkdir()
    return str(path)


@pytest.mark.parametrize(
    ("files", "args", "expected"),
    [
        ({"architecture": "LlamaForCausalLM"}, {}, False),
        ({"architecture": "T5ForConditionalGeneration"}, {}, False),
        ({"architecture": "GPT2LMHeadModel"}, {}, False),
        ({"architecture": "BertModel"}, {}, True),
        ({"architecture": "BertForSequenceClassification"}, {}, True),
        ({"architecture": "Qwen3ForCausalLM", "pooling": True}, {}, True),
        (
            {"architecture": "Qwen3ForCausalLM", "modules": [{"path": "p", "type": "sentence_transformers.models.Pooling"}]},
            {},
            True,
        ),
        ({"architecture": "LlamaForCausalLM"}, {"runner": "pooling"}, True),
        ({"architecture": "LlamaForCausalLM"}, {"convert": "embed"}, True),
        ({"architecture": "BertModel"}, {"runner": "generate"}, False),
        ({}, {}, False),
    ],
)
def test_a_model_that_pools_is_known_by_its_files_or_settings(
    tmp_path: Path, files: dict[str, Any], args: dict[str, Any], expected: bool
) -> None:
    config = EngineConfig(model=folder(tmp_path, **files), served_name="m", args=args)
    assert pools(config) is expected
    assert kv_events_wanted(config) is not expected


def test_a_damaged_config_is_vllms_own_business(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[")
    assert pools(EngineConfig(model=str(tmp_path), served_name="m")) is False


def model(task: str | None, **config: Any) -> Any:
    return SimpleNamespace(
        model="m", use_sep_token=True, hf_config=SimpleNamespace(**config), get_pooling_task=lambda tasks: task
    )


def test_what_a_model_serves_follows_from_vllms_task() -> None:
    assert pooling_kinds(model("embed"), ("embed",)) == ("embedding",)
    assert pooling_kinds(model("classify", num_labels=3), ("classify",)) == ("classify",)
    with pytest.raises(EngineStartFailed, match="m is for token_embed; embed and classify are served"):
        pooling_kinds(model("token_embed"), ("token_embed",))


def test_classes_have_names_only_if_all_have() -> None:
    assert class_labels(model(None, id2label={0: "a", 1: "b"})) == ("a", "b")
    assert class_labels(model(None, id2label={1: "b"})) == ()
    assert class_labels(model(None)) == ()


class Tensor:
    """As much of one as is used."""

    def __init__(self, numbers: list[float]) -> None:
        self._numbers = numbers

    def detach(self) -> Tensor:
        return self

    float = cpu = contiguous = detach

    def numpy(self) -> Any:
        return np.array(self._numbers, dtype=np.float64)


class FakeLlm:
    """Answers every input after `go`, with its ids as the vector."""

    def __init__(self, **hf_config: Any) -> None:
        self.vllm_config = SimpleNamespace(
            scheduler_config=SimpleNamespace(policy="priority"),
            model_config=SimpleNamespace(hf_config=SimpleNamespace(**hf_config)),
        )
        self.go = asyncio.Event()
        self.asked: list[tuple[Any, Any, str, int]] = []
        self.closed: list[str] = []
        self.error: Any = None
        self.raises: Exception | None = None

    async def encode(self, prompt: Any, params: Any, request_id: str, *, priority: int) -> AsyncGenerator[Any]:
        self.asked.append((prompt, params, request_id, priority))
        try:
            await self.go.wait()
            if self.raises is not None:
                raise self.raises
            outputs = SimpleNamespace(data=Tensor([float(i) for i in prompt]))
            yield SimpleNamespace(error=self.error, finished=True, num_cached_tokens=1, outputs=outputs)
        finally:
            self.closed.append(request_id)


@pytest.fixture(autouse=True)
def imitation(monkeypatch: pytest.MonkeyPatch) -> None:
    vllm = SimpleNamespace(PoolingParams=SimpleNamespace)
    monkeypatch.setitem(sys.modules, "vllm", vllm)
    monkeypatch.setitem(sys.modules, "vllm.inputs", SimpleNamespace(tokens_input=lambda ids: ids))


def pooling(llm: FakeLlm, meter: LoadMeter | None = None, kinds: tuple[str, ...] = ("embedding",)) -> VllmPooling:
    def translate(error: BaseException) -> BaseException:
        return RequestInvalid(str(error), param="dimensions") if isinstance(error, ValueError) else error

    return VllmPooling(llm, kinds, meter or LoadMeter(), translate)


def item(**more: Any) -> PoolItem:
    return PoolItem(**{"id": "r-1-0", "task": "embed", "token_ids": [5, 6], "priority": 2, **more})


async def test_an_input_becomes_a_request_and_its_tensor_a_vector() -> None:
    llm = FakeLlm()
    llm.go.set()
    pooled = await pooling(llm).pool(item(dimensions=3, normalize=False, second=1))
    assert array("f", pooled.vector).tolist() == [5.0, 6.0]
    assert pooled.cached_tokens == 1
    ((prompt, params, request_id, priority),) = llm.asked
    assert (prompt, request_id, priority) == ([5, 6], "r-1-0", 2)
    assert (params.task, params.dimensions, params.use_activation, params.extra_kwargs) == ("embed", 3, False, None)


async def test_only_models_with_token_types_are_told_where_the_second_text_begins() -> None:
    llm = FakeLlm(type_vocab_size=2)
    llm.go.set()
    engine = pooling(llm, kinds=("score",))
    await engine.pool(item(task="classify", second=1))
    await engine.pool(item(task="classify"))
    await pooling(llm).pool(item(second=1))
    assert [params.extra_kwargs for _, params, _, _ in llm.asked] == [{"compressed_token_type_ids": 1}, None, None]


async def test_load_counts_what_is_inside_until_it_is_cancelled() -> None:
    llm, meter = FakeLlm(), LoadMeter()
    engine = pooling(llm, meter)
    task = asyncio.create_task(engine.pool(item()))
    while not llm.asked:
        await asyncio.sleep(0)
    assert engine.running == 1
    assert meter.read(mine=1, blocks=0).queued_prefill_tokens == 2
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (engine.running, llm.closed) == (0, ["r-1-0"])
    assert meter.read(mine=1, blocks=0).queued_prefill_tokens == 0


async def test_what_vllm_refuses_is_translated_and_what_it_gives_up_on_may_be_tried_elsewhere() -> None:
    llm = FakeLlm()
    llm.go.set()
    llm.raises = ValueError("not Matryoshka")
    with pytest.raises(RequestInvalid, match="not Matryoshka"):
        await pooling(llm).pool(item())
    llm.raises, llm.error = None, "broken"
    with pytest.raises(EngineError, match="gave up on the input: broken") as caught:
        await pooling(llm).pool(item())
    assert caught.value.retriable


async def test_what_it_cannot_do_is_refused_before_it_is_tried() -> None:
    llm = FakeLlm()
    with pytest.raises(UnsupportedByEngine, match="serves embedding, not classify"):
        await pooling(llm).pool(item(task="classify"))
    with pytest.raises(UnsupportedByEngine, match="adapters"):
        await pooling(llm).pool(item(adapter="a"))
    with pytest.raises(RequestInvalid, match="no setting 'temperature'") as caught:
        await pooling(llm).pool(item(extra={"temperature": 1}))
    assert caught.value.param == "temperature"
    assert not llm.asked
