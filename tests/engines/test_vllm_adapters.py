"""An adapter on the real vLLM: a model of its own, with a cache of its own, beside the model it belongs to."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.conftest import ARGS, QUESTIONS
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.timeout(400)]

ENGINE_START_S = 240.0
RANK = 8


def write_adapter(folder: Path, model_dir: Path, *, seed: int = 7) -> Path:
    """Random weights for two projections of every layer, large enough to be heard."""
    import torch
    from safetensors.torch import save_file

    config = json.loads((model_dir / "config.json").read_bytes())
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    head = config.get("head_dim") or hidden // config["num_attention_heads"]
    width = {"q_proj": head * config["num_attention_heads"], "v_proj": head * config["num_key_value_heads"]}
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(layers):
        for name, out in width.items():
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            weights[f"{prefix}.lora_A.weight"] = torch.randn(RANK, hidden, generator=random) * 0.2
            weights[f"{prefix}.lora_B.weight"] = torch.randn(out, RANK, generator=random) * 0.2
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    said = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": RANK, "lora_alpha": 16, "lora_dropout": 0.0, "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**said, "target_modules": sorted(width)}))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("adapters")


@pytest.fixture(scope="module")
def api(folder: Path, model_dir: Path) -> Iterator[openai.OpenAI]:
    adapter = write_adapter(folder / "odd", model_dir)
    flags = [f for name, value in ARGS.items() for f in ("--engine-arg", f"{name}={value}")]
    flags += ["--engine-arg", f"adapters={json.dumps({'odd': str(adapter)})}", "--adapter-routes"]
    up = RunningUp(folder, "--model", str(model_dir), "--served-name", "small", *flags, engine="vllm")
    try:
        up.until("ready", lambda: up.state()["ready"], ENGINE_START_S)
        with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as client:
            yield client
        up.process.terminate()
        assert up.process.wait(60) == 0, up.log()
    finally:
        up.stop()


def ask(api: openai.OpenAI, model: str) -> Any:
    messages: Any = [{"role": "user", "content": QUESTIONS[2] * 8}]
    return api.chat.completions.create(model=model, messages=messages, max_tokens=16, temperature=0)


def cached(answer: Any) -> int:
    tokens: int = answer.usage.prompt_tokens_details.cached_tokens
    return tokens


def test_it_is_listed_with_its_model_as_parent(api: openai.OpenAI) -> None:
    listed: dict[str, Any] = {model.id: model for model in api.models.list()}
    assert sorted(listed) == ["odd", "small"]
    assert listed["odd"].parent == "small"


def test_it_says_something_else_and_shares_no_cache_with_its_model(api: openai.OpenAI) -> None:
    plain, odd = ask(api, "small"), ask(api, "odd")
    assert (plain.model, odd.model) == ("small", "odd")
    assert plain.choices[0].message.content != odd.choices[0].message.content
    assert cached(odd) == 0, "the blocks of the model are not those of its adapter"
    again = [ask(api, "small"), ask(api, "odd")]
    assert [a.choices[0].message.content for a in again] == [a.choices[0].message.content for a in (plain, odd)]
    assert all(cached(answer) > 0 for answer in again)


def change(api: openai.OpenAI, what: str, name: str, folder: Path | None = None, **more: str) -> None:
    body = {"lora_name": name, **({"lora_path": str(folder)} if folder is not None else {}), **more}
    api.post(f"/{what}_lora_adapter", body=body, cast_to=str)


def until_listed(api: openai.OpenAI, names: list[str]) -> None:
    give_up = time.monotonic() + 20
    while sorted(model.id for model in api.models.list()) != names:
        assert time.monotonic() < give_up
        time.sleep(0.02)


def said(answer: Any) -> str:
    text: str = answer.choices[0].message.content
    return text


def test_one_is_loaded_while_it_serves_and_unloaded_again(api: openai.OpenAI, folder: Path, model_dir: Path) -> None:
    """The engine has room for one at a time: they take turns."""
    with pytest.raises(openai.BadRequestError, match="cannot read"):
        change(api, "load", "new", folder / "nothing")
    change(api, "load", "new", write_adapter(folder / "new", model_dir, seed=8))
    until_listed(api, ["new", "odd", "small"])
    plain, odd, new = (ask(api, name) for name in ("small", "odd", "new"))
    assert len({said(answer) for answer in (plain, odd, new)}) == 3
    assert cached(new) == 0
    again = ask(api, "new")
    assert (said(again), cached(again) > 0) == (said(new), True)
    change(api, "unload", "new")
    until_listed(api, ["odd", "small"])
    with pytest.raises(openai.NotFoundError):
        ask(api, "new")
    change(api, "load", "new", folder / "odd")  # another one by the same name
    until_listed(api, ["new", "odd", "small"])
    other = ask(api, "new")
    assert (said(other), cached(other)) == (said(odd), 0), "what the one before has cached is not its own"
