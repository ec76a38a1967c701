"""Names and plain types of TensorRT-LLM's settings, by a source that is only read."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.trtllm import argument_check
from headrace.workers.trtllm.argument_check import check_arguments, trtllm_settings
from tests.support import tensorrt_llm_stand_in as stand_in

PUBLISHED = '''
class KvCacheConfig(StrictBaseModel, PybindMirror):
    """Of the KV cache."""
    enable_block_reuse: bool = Field(default=True, description="")
    max_tokens: Optional[int] = Field(default=None)

class BaseLlmArgs(StrictBaseModel):
    model_config = {"extra": "forbid"}
    model: Union[str, Path] = Field(description="")
    max_batch_size: Optional[PositiveInt] = Field(default=2048)
    kv_cache_config: KvCacheConfig = Field(default_factory=KvCacheConfig)

    def check(self):
        local: int = 1

class TorchLlmArgs(BaseLlmArgs):
    stream_interval: PositiveInt = Field(default=1)
    kind: ClassVar[str] = "torch"
'''


def package(folder: Path, source: str) -> Path:
    (folder / "llmapi").mkdir()
    (folder / "llmapi" / "llm_args.py").write_text(source)
    return folder


def test_a_source_of_the_published_shape_is_read_with_its_bases(tmp_path: Path) -> None:
    found = trtllm_settings(package(tmp_path, PUBLISHED))
    assert found["TorchLlmArgs"].keys() == {"model", "max_batch_size", "kv_cache_config", "stream_interval"}
    assert found["TorchLlmArgs"]["max_batch_size"] == "Optional[int]"
    assert found["KvCacheConfig"] == {"enable_block_reuse": "bool", "max_tokens": "Optional[int]"}
    assert found["CacheTransceiverConfig"] == {}


@pytest.fixture(params=stand_in.VERSIONS)
def installed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    found = trtllm_settings(stand_in.PACKAGE_DIR / "tensorrt_llm")
    assert len(found["TorchLlmArgs"]) > 50
    monkeypatch.setattr(argument_check, "trtllm_settings", lambda: found)


@pytest.mark.usefixtures("installed")
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"max_batchsize": 8}, "TensorRT-LLM has no setting 'max_batchsize'; close to it: max_batch_size"),
        ({"model": "m"}, "give 'model' as --model, not as an engine setting"),
        ({"max_seq_len": "4k"}, "TensorRT-LLM takes a whole number as max_seq_len, not '4k'"),
        ({"enable_attention_dp": "yes"}, "TensorRT-LLM takes true or false as enable_attention_dp, not 'yes'"),
        ({"kv_cache_config": {"tokens_per_blok": 32}}, "kv_cache_config of TensorRT-LLM has no field 'tokens_per_blok'; close"),
        ({"kv_cache_config": {"max_gpu_total_bytes": "all"}}, "TensorRT-LLM's kv_cache_config takes a whole number as max_gpu"),
        ({"cache_transceiver_config": {"backnd": "UCX"}}, "cache_transceiver_config of TensorRT-LLM has no field 'backnd'"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_may_be(args: dict[str, Any], said: str) -> None:
    with pytest.raises(EngineStartFailed) as refused:
        check_arguments(args)
    assert said in str(refused.value)


@pytest.mark.usefixtures("installed")
def test_what_the_source_cannot_refuse_passes() -> None:
    check_arguments(
        {
            "max_batch_size": 8,
            "max_seq_len": None,
            "load_format": "whatever TensorRT-LLM says",
            "kv_cache_config": {"tokens_per_block": 64, "free_gpu_memory_fraction": 0.5},
            "cache_transceiver_config": {"backend": "UCX"},
            "adapters": {},
        }
    )


@pytest.mark.parametrize("source", ["", "def (", "class TorchLlmArgs(TorchLlmArgs):\n    x: int = 1\n"])
def test_a_source_that_is_not_as_expected_refuses_nothing(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert trtllm_settings(package(tmp_path, source)) == {}
    monkeypatch.setattr(argument_check, "trtllm_settings", dict)
    check_arguments({"anything": 1})


def test_the_installed_package_is_read_and_not_imported() -> None:
    script = (
        "import sys; from headrace.workers.trtllm.argument_check import check_arguments, trtllm_settings\n"
        "assert trtllm_settings()['TorchLlmArgs']['max_num_tokens'] == 'int | None'\n"
        "check_arguments({'max_num_tokens': 5})\n"
        "assert not {'tensorrt_llm', 'torch'} & sys.modules.keys()"
    )
    environ = {"PYTHONPATH": str(stand_in.PACKAGE_DIR), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environ)
