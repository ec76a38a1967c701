"""Names and plain types of vLLM's settings, by a source that is only read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm import settings
from headrace.workers.vllm.settings import check_arguments, vllm_settings

SOURCE = """
@dataclass
class EngineArgs:
    model: str = ModelConfig.model
    max_model_len: int = 0
    block_size: int | None = None
    gpu_memory_utilization: float = 0.9
    enforce_eager: bool = False
    dtype: ModelDType = "auto"

    def create(self) -> None:
        inner: int = 1


@dataclass
class AsyncEngineArgs(EngineArgs):
    enable_log_requests: bool = False
"""


@pytest.fixture(autouse=True)
def read_source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    package = tmp_path / "vllm"
    (package / "engine").mkdir(parents=True)
    (package / "engine" / "arg_utils.py").write_text(SOURCE)
    found = vllm_settings(package)
    monkeypatch.setattr(settings, "vllm_settings", lambda: found)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"max_modle_len": 1}, "vLLM has no setting 'max_modle_len'; close to it: max_model_len"),
        ({"inner": 1}, "vLLM has no setting 'inner'"),
        ({"max_model_len": "4k"}, "vLLM takes a whole number as max_model_len, not '4k'"),
        ({"max_model_len": 0.5}, "a whole number"),
        ({"block_size": True}, "a whole number"),
        ({"gpu_memory_utilization": "most"}, "vLLM takes a number as gpu_memory_utilization, not 'most'"),
        ({"enforce_eager": "True"}, "vLLM takes true or false as enforce_eager, not 'True'"),
        ({"enable_log_requests": 2}, "true or false"),
        ({"kv_host_gib": 1}, "vLLM has no setting 'kv_host_gib'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_may_be(args: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineStartFailed) as refused:
        check_arguments(args)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"max_model_len": 4096, "block_size": None, "gpu_memory_utilization": 1, "enforce_eager": True},
        {"max_model_len": 4096.0, "gpu_memory_utilization": 0.5, "enforce_eager": 0},
        {"dtype": "whatever vLLM says"},
        {"kv_transfer_mode": "push", "adapters": {}},
    ],
)
def test_what_the_source_cannot_refuse_passes(args: dict[str, Any]) -> None:
    check_arguments(args)


def test_a_source_that_is_not_as_expected_refuses_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for text in (None, "class EngineArgs: ...", "def ("):
        package = tmp_path / str(text and len(text))
        (package / "engine").mkdir(parents=True)
        if text is not None:
            (package / "engine" / "arg_utils.py").write_text(text)
        assert vllm_settings(package) == {}
    monkeypatch.setattr(settings, "vllm_settings", dict)
    check_arguments({"anything": 1})


def test_the_installed_vllm_is_read_and_not_imported() -> None:
    script = (
        "import sys; from importlib.util import find_spec; from headrace.workers.vllm.settings import vllm_settings;"
        "found = vllm_settings(); there = find_spec('vllm') is not None;"
        "assert not there or found['max_model_len'] == 'int', found;"
        "assert not {'vllm', 'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
