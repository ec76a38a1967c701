"""A model without `tokenizer.json`, whose vocabulary lies in `vocab.json` and `merges.txt`, on the real engines.

The worker writes that file from the engine's own tokenizer, so that frontends have the engine's ids.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.engines.conftest import ARGS, DIRECT_TOKENS, QUESTIONS
from tests.engines.support.sglang_args import ARGS as SGLANG_ARGS
from tests.engines.support.sglang_args import needs_sglang
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.long_engine, pytest.mark.timeout(1200)]

START_S = 600.0


@pytest.fixture
def without_file(model_dir: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(model_dir, folder, copy_function=lambda source, target: Path(target).symlink_to(source))
    vocabulary = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text(json.dumps(vocabulary["vocab"]))
    merges = (pair if isinstance(pair, str) else " ".join(pair) for pair in vocabulary["merges"])
    (folder / "merges.txt").write_text("\n".join(("#version: 0.2", *merges)) + "\n")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").unlink()
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "GPT2Tokenizer"}))
    return folder


def _answers(up: RunningUp) -> list[str]:
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=120) as api:
        asked = [
            api.chat.completions.create(
                model="small", messages=[{"role": "user", "content": question}], max_tokens=DIRECT_TOKENS, temperature=0
            )
            for question in QUESTIONS
        ]
    return [str(answer.choices[0].message.content) for answer in asked]


def _serve(folder: Path, engine: str, args: dict[str, Any], where: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(where / "cache"))
    flags = [f for name, value in args.items() for f in ("--engine-arg", f"{name}={value}")]
    (where / "up").mkdir()
    up = RunningUp(where / "up", "--model", str(folder), "--served-name", "small", *flags, engine=engine)
    try:
        up.until("ready", lambda: up.state()["ready"], START_S)
        return _answers(up)
    finally:
        up.stop()


def test_vllm_answers_as_with_the_file(
    without_file: Path, direct: list[list[int]], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert _serve(without_file, "vllm", ARGS, tmp_path, monkeypatch) == [tokenizer.decode(tokens) for tokens in direct]
    assert len(list((tmp_path / "cache" / "headrace" / "tokenizers").iterdir())) == 1


@needs_sglang
def test_sglang_answers_as_with_the_file(
    without_file: Path, direct_sglang: list[list[int]], tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = _serve(without_file, "sglang", SGLANG_ARGS, tmp_path, monkeypatch)
    assert texts == [tokenizer.decode(tokens) for tokens in direct_sglang]
    assert len(list((tmp_path / "cache" / "headrace" / "tokenizers").iterdir())) == 1
