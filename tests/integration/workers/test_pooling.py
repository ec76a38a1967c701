"""Embeddings, scores and classes from a client to simulated engines and back, also while a worker dies."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
import subprocess
import sys
import urllib.request
from array import array
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.local_deployment import Serving, serving, sim
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.asyncio(loop_scope="module")

EMBEDDER, SCORER, CLASSIFIER, CHAT = "acme/embedder", "acme/scorer", "acme/classifier", "acme/chat"
TEXTS = [f"text number {n} about {topic}" for n, topic in enumerate(["bread", "trains", "rain"] * 20)]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer) -> AsyncIterator[Serving]:
    models = [
        sim(EMBEDDER, args={"pooling": "embed", "context_length": 512}),
        sim(SCORER, args={"pooling": "score"}),
        sim(CLASSIFIER, args={"pooling": "classify"}),
        sim(CHAT),
    ]
    async with serving(nats_server, Subjects(f"pool{os.getpid()}"), *models) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployment: Serving) -> AsyncIterator[AsyncOpenAI]:
    async with AsyncOpenAI(base_url=f"{deployment.url}/v1", api_key="none", max_retries=0) as made:
        yield made


async def ask(deployment: Serving, path: str, **body: Any) -> Any:
    async with httpx.AsyncClient(base_url=deployment.url, timeout=30) as http:
        answer = await http.post(path, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def test_the_openai_client_gets_the_same_numbers_in_both_formats(client: AsyncOpenAI) -> None:
    plain = await client.embeddings.create(model=EMBEDDER, input=TEXTS[:5], encoding_format="float")
    coded = await client.embeddings.create(model=EMBEDDER, input=TEXTS[:5])  # the client asks for base64 by itself
    assert [entry.embedding for entry in plain.data] == [entry.embedding for entry in coded.data]
    assert [entry.index for entry in plain.data] == list(range(5))
    assert all(len(entry.embedding) == 64 for entry in plain.data)
    assert plain.model == EMBEDDER
    assert plain.usage == coded.usage
    assert plain.usage.prompt_tokens == plain.usage.total_tokens > 0
    raw = await client.embeddings.create(model=EMBEDDER, input=TEXTS[0], encoding_format="base64")
    bits = array("f")
    bits.frombytes(base64.b64decode(raw.data[0].embedding))  # type: ignore[arg-type]
    assert bits.tolist() == plain.data[0].embedding


async def test_one_by_one_or_all_together_gives_the_same(client: AsyncOpenAI) -> None:
    together = await client.embeddings.create(model=EMBEDDER, input=TEXTS)
    for n in (0, 16, 59):
        alone = await client.embeddings.create(model=EMBEDDER, input=TEXTS[n])
        assert alone.data[0].embedding == together.data[n].embedding


async def test_ids_are_what_the_text_would_be(client: AsyncOpenAI, deployment: Serving) -> None:
    ids = (await ask(deployment, "/tokenize", model=EMBEDDER, prompt=TEXTS[0]))["tokens"]
    by_ids = await client.embeddings.create(model=EMBEDDER, input=[ids, ids[:2]])
    by_text = await client.embeddings.create(model=EMBEDDER, input=TEXTS[0])
    assert by_ids.data[0].embedding == by_text.data[0].embedding
    assert by_ids.data[1].embedding != by_text.data[0].embedding
    assert (await ask(deployment, "/detokenize", model=EMBEDDER, tokens=ids)) == {"prompt": TEXTS[0]}


async def test_dimensions(client: AsyncOpenAI) -> None:
    answer = await client.embeddings.create(model=EMBEDDER, input="a text", dimensions=8)
    assert len(answer.data[0].embedding) == 8
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model=EMBEDDER, input="a text", dimensions=65)
    assert caught.value.param == "dimensions"


@pytest.mark.slow
async def test_a_large_batch_comes_back_whole_and_in_order(client: AsyncOpenAI) -> None:
    batch = [[n % 1000 + 20, n // 1000 + 20] for n in range(2048)]
    answer = await client.embeddings.create(model=EMBEDDER, input=batch)
    assert [entry.index for entry in answer.data] == list(range(2048))
    alone = await client.embeddings.create(model=EMBEDDER, input=[batch[1500]])
    assert answer.data[1500].embedding == alone.data[0].embedding
    assert answer.usage.prompt_tokens == 4096
    with pytest.raises(openai.BadRequestError, match="at most 2048 inputs"):
        await client.embeddings.create(model=EMBEDDER, input=[*batch, [20]])


async def test_the_wrong_kind_of_model_is_a_400_either_way(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model=CHAT, input="a")
    assert caught.value.code == "wrong_kind"
    with pytest.raises(openai.BadRequestError) as caught:
        await client.chat.completions.create(model=EMBEDDER, messages=[{"role": "user", "content": "hi"}])
    assert caught.value.code == "wrong_kind"
    assert "embedding" in str(caught.value)


async def test_an_input_that_is_too_long_is_refused_or_cut(client: AsyncOpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        await client.embeddings.create(model=EMBEDDER, input=["short", "long " * 600])
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input[1]")
    answer = await client.embeddings.create(model=EMBEDDER, input=["long " * 600], extra_body={"truncate_prompt_tokens": -1})
    assert answer.usage.prompt_tokens == 512


@pytest.mark.parametrize("model", [EMBEDDER, SCORER])
async def test_a_ranking_puts_what_shares_words_first(deployment: Serving, model: str) -> None:
    documents = ["interest rates rose on Monday", "to bake bread take flour and water", "the train was late"]
    for path in ("/v1/rerank", "/v2/rerank"):
        body = await ask(deployment, path, model=model, query="how do I bake bread", documents=documents, top_n=2)
        assert len(body["results"]) == 2
        assert body["results"][0]["index"] == 1
        assert body["results"][0]["document"]["text"] == documents[1]
        assert body["results"][0]["relevance_score"] > body["results"][1]["relevance_score"]
        assert body["usage"]["total_tokens"] > 0


async def test_scores_of_an_embedding_model_are_cosines(deployment: Serving, client: AsyncOpenAI) -> None:
    body = await ask(deployment, "/v1/score", model=EMBEDDER, text_1=TEXTS[0], text_2=TEXTS[:3])
    vectors = [e.embedding for e in (await client.embeddings.create(model=EMBEDDER, input=TEXTS[:3])).data]
    cosines = [sum(a * b for a, b in zip(vectors[0], other, strict=True)) for other in vectors]
    assert [entry["score"] for entry in body["data"]] == pytest.approx(cosines, abs=1e-6)


async def test_classes_and_plain_vectors(deployment: Serving) -> None:
    body = await ask(deployment, "/classify", model=CLASSIFIER, input=TEXTS[:2])
    for entry in body["data"]:
        assert (entry["num_classes"], sum(entry["probs"])) == (3, pytest.approx(1.0, abs=1e-6))
        assert entry["label"] == f"class-{entry['probs'].index(max(entry['probs']))}"
    plain = await ask(deployment, "/pooling", model=CLASSIFIER, input=TEXTS[:2])
    assert [entry["data"] for entry in plain["data"]] == [entry["probs"] for entry in body["data"]]


# -- a worker that dies ------------------------------------------------------------------------------------------


class WorkerProcess:
    """`headrace worker` with a simulated embedding model, a metrics port, and four inputs per tenth of a second."""

    def __init__(self, folder: Path, nats: str, *flags: str, served: str = EMBEDDER, metrics: int | None = None) -> None:
        self.metrics = metrics
        command = [sys.executable, "-P", "-m", "headrace", "worker", "--engine", "sim", "--nats", nats, "--served-name", served]
        command += ["--engine-arg", "pooling=embed", *flags]
        if metrics is not None:
            command += ["--metrics-port", str(metrics)]
        with (folder / f"worker-{metrics}.log").open("wb") as log:
            self.process = subprocess.Popen(
                command,
                cwd=folder,
                stdout=log,
                stderr=log,
                env={name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")},
            )

    def metric(self, name: str) -> float:
        """The sum of a counter's series; 0 while there is no answer."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.metrics}/metrics", timeout=2) as answer:
                lines = answer.read().decode().splitlines()
        except OSError:
            return 0.0
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name) and not line.startswith("#"))

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


@contextmanager
def ended(*workers: WorkerProcess) -> Iterator[None]:
    try:
        yield
    finally:
        for worker in workers:
            if worker.process.poll() is None:
                worker.kill()


def free_port() -> int:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


async def pooled(worker: WorkerProcess) -> float:
    """Return how many inputs a worker has pooled."""
    return await asyncio.to_thread(worker.metric, "headrace_worker_pooled_total")


@pytest.mark.fault
async def test_a_killed_worker_in_the_middle_of_a_batch_costs_no_input_and_computes_none_twice(
    nats_server: EmbeddedServer, tmp_path: Path
) -> None:
    subjects = Subjects(f"poolkill{os.getpid()}")
    slow = ["--slots", "4", "--engine-arg", 'timing_overrides={"prefill_tokens_per_s": 300}', "--prefix", subjects.prefix]
    async with serving(nats_server, subjects) as running:
        one, two = (WorkerProcess(tmp_path, nats_server.url, *slow, metrics=free_port()) for _ in range(2))
        with ended(one, two):
            async with httpx.AsyncClient(base_url=running.url, timeout=60) as http:
                async with asyncio.timeout(30):
                    while (await http.get("/health")).json()["models"].get(EMBEDDER, {"workers": 0})["workers"] < 2:
                        await asyncio.sleep(0.05)
                request = asyncio.create_task(http.post("/v1/embeddings", json={"model": EMBEDDER, "input": TEXTS}))
                async with asyncio.timeout(30):
                    while not any([4 <= await pooled(each) < 16 for each in (one, two)]):
                        await asyncio.sleep(0.01)
                if not await pooled(one):
                    one, two = two, one  # either may have taken it
                one.kill()
                answer = await request
                assert answer.status_code == 200, answer.text
                body = answer.json()
                assert [entry["index"] for entry in body["data"]] == list(range(len(TEXTS)))
                resumed = await asyncio.to_thread(two.metric, "headrace_worker_resumed_total")
                assert resumed == 1
                again = (await http.post("/v1/embeddings", json={"model": EMBEDDER, "input": TEXTS})).json()
                assert body["data"] == again["data"]
                assert body["usage"] == again["usage"]
                assert await pooled(two) < 2 * len(TEXTS)


# -- two models behind one ingress ---------------------------------------------------------------------------------


@pytest.mark.deployment
async def test_a_chat_model_and_an_embedding_model_behind_one_headrace_up(tmp_path: Path) -> None:
    up = RunningUp(tmp_path, "--served-name", CHAT)
    try:
        await asyncio.to_thread(up.until_ready)
        state = up.state()
        worker = WorkerProcess(tmp_path, state["nats"]["url"])
        with ended(worker):
            async with AsyncOpenAI(base_url=f"{state['url']}/v1", api_key="none") as client:
                async with asyncio.timeout(30):
                    while {model.id for model in (await client.models.list()).data} != {CHAT, EMBEDDER}:
                        await asyncio.sleep(0.05)
                embedded = await client.embeddings.create(model=EMBEDDER, input=["one", "two"])
                assert [len(entry.embedding) for entry in embedded.data] == [64, 64]
                said = await client.chat.completions.create(
                    model=CHAT, messages=[{"role": "user", "content": "hi"}], max_tokens=4
                )
                assert said.choices[0].message.content
                with pytest.raises(openai.BadRequestError):
                    await client.embeddings.create(model=CHAT, input="one")
                assert (await client.models.retrieve(EMBEDDER)).id == EMBEDDER
    finally:
        up.stop()
