"""Our settings as TensorRT-LLM's, log levels, and what a model's files say."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.workers.errors import EngineError, EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.trtllm import settings
from headrace.workers.trtllm.settings import LOG_LEVELS, check_arguments, prepare_environment, trtllm_settings
from headrace.workers.trtllm.start import local_folder, read_model
from tests.support import tensorrt_llm_stand_in as stand_in
from tests.unit.workers.trtllm.engine_bench import PROMPT, CacheView, follow, running, sequence, versions


@pytest.mark.parametrize(("ours", "theirs"), [("debug", "verbose"), ("INFO", "info"), ("warning", "warning"), ("odd", "info")])
def test_the_log_level_is_handed_on_in_its_own_words(ours: str, theirs: str) -> None:
    environ = {"HEADRACE_LOG_LEVEL": ours}
    prepare_environment(environ)
    assert environ["TLLM_LOG_LEVEL"] == theirs
    kept = {"TLLM_LOG_LEVEL": "trace"}
    prepare_environment(kept)
    assert kept["TLLM_LOG_LEVEL"] == "trace"


def test_every_log_level_of_ours_has_one_of_theirs() -> None:
    assert {name.upper() for name in LOG_LEVELS} <= logging.getLevelNamesMapping().keys()


def test_a_model_says_its_length_its_vocabulary_and_its_end_tokens(tmp_path: Path) -> None:
    folder = stand_in.model_folder(tmp_path / "m", context_length=1000)
    files = read_model(local_folder(str(folder)))
    assert (files.context_length, files.vocab_size, files.eos_token_ids, files.chat) == (1000, 49152, (2,), True)
    generation = {"eos_token_id": [2, 7], "temperature": 0.6, "top_p": "no"}
    (folder / "generation_config.json").write_text(json.dumps(generation))
    files = read_model(folder)
    assert (files.eos_token_ids, files.default_sampling) == ((2, 7), {"temperature": 0.6})
    (folder / "config.json").write_text(json.dumps({"text_config": {"vocab_size": 5, "max_position_embeddings": 6}}))
    (folder / "generation_config.json").unlink()
    files = read_model(folder)
    assert (files.vocab_size, files.context_length, files.eos_token_ids) == (5, 6, (2,))  # the tokenizer's own end token


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("config.json", "{", "is not JSON"),
        ("config.json", "[]", "is not an object"),
        ("config.json", "{}", "has no vocab_size"),
        ("tokenizer.json", None, "has no tokenizer.json"),
        ("config.json", None, "cannot read"),
    ],
)
def test_files_that_cannot_be_used_are_named(tmp_path: Path, name: str, content: str | None, told: str) -> None:
    folder = stand_in.model_folder(tmp_path / "m")
    (folder / name).unlink()
    if content is not None:
        (folder / name).write_text(content)
    with pytest.raises(EngineStartFailed, match=told):
        read_model(folder)


@versions
async def test_requests_go_to_the_attention_rank_they_name_and_its_blocks_are_told(version: str) -> None:
    args = {"tensor_parallel_size": 2, "enable_attention_dp": True}
    async with running(version=version, **args) as bench:
        assert (bench.info.ranks, bench.info.blocks, bench.info.slots) == (2, 1024, 32)
        await bench.run(sequence("r0", max_tokens=1, rank=0))
        await bench.run(sequence("other", list(range(900, 940)), max_tokens=1, rank=1))
        await bench.run(sequence("r1", max_tokens=1, rank=0, extra={"attention_dp_rank": 1}))  # what the client says counts
        await bench.run(sequence("again", max_tokens=1, rank=1))
        assert [bench.outputs(name)[0].cached_tokens for name in ("r0", "r1", "again")] == [0, 0, 64]
        for rank, held in ((0, 2), (1, 3)):
            view = CacheView()
            await follow(bench, view, lambda view, held=held: len(view.held) == held, rank=rank)
            assert tuple(PROMPT[:32]) in view.tier("device")
            assert (tuple(range(900, 932)) in view.tier("device")) == (rank == 1)
        with pytest.raises(RequestInvalid, match="ranks 0 to 1"):
            await bench.engine.submit(sequence("x", extra={"attention_dp_rank": 2}))


@versions
async def test_adapters_are_chosen_per_request_and_can_be_added_and_removed(tmp_path: Path, version: str) -> None:
    folder = str(stand_in.adapter_folder(tmp_path / "fr"))
    async with running(version=version, adapters={"fr": folder}) as bench:
        assert (bench.info.adapters, bench.engine.capabilities.lora) == (("fr",), "dynamic")
        await bench.run(sequence("base"), sequence("fr", adapter="fr"))
        assert bench.ids("base") != bench.ids("fr")
        source = str(stand_in.adapter_folder(tmp_path / "de"))
        await bench.engine.control("load_adapter", {"name": "de", "source": source})
        await bench.engine.control("load_adapter", {"name": "de", "source": source})  # nothing more
        await bench.run(sequence("de", adapter="de"))
        assert bench.ids("de") not in (bench.ids("base"), bench.ids("fr"))
        with pytest.raises(EngineError, match="unload it first"):
            await bench.engine.control("load_adapter", {"name": "de", "source": folder})
        large = str(stand_in.adapter_folder(tmp_path / "large", rank=64))
        with pytest.raises(EngineError, match="max_lora_rank=8"):
            await bench.engine.control("load_adapter", {"name": "large", "source": large})
        await bench.engine.control("unload_adapter", {"name": "de"})
        with pytest.raises(RequestInvalid, match="no adapter 'de'; it has: fr"):
            await bench.engine.submit(sequence("x", adapter="de"))
    async with running(version=version) as bench:
        with pytest.raises(UnsupportedByEngine):
            await bench.engine.control("load_adapter", {"name": "de", "source": source})


async def test_a_lower_priority_number_is_served_sooner_where_the_release_knows_priorities() -> None:
    async with running(options={"timing": "cpu-small"}, max_batch_size=1) as bench:
        assert bench.engine.capabilities.priority
        await bench.engine.submit(sequence("running", max_tokens=3))
        await bench.until(lambda: bool(bench.ids("running")))
        for name, priority in (("late", 5), ("soon", -5)):
            await bench.engine.submit(sequence(name, max_tokens=1, priority=priority))
        await bench.until(lambda: bench.ended("late") and bench.ended("soon"))
        order = [output.id for call in bench.calls for output in call]
        assert order.index("soon") < order.index("late")
    async with running(version=stand_in.V1_2) as bench:
        assert not bench.engine.capabilities.priority


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
    monkeypatch.setattr(settings, "trtllm_settings", lambda: found)


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
    monkeypatch.setattr(settings, "trtllm_settings", dict)
    check_arguments({"anything": 1})


def test_the_installed_package_is_read_and_not_imported() -> None:
    script = (
        "import sys; from headrace.workers.trtllm.settings import check_arguments, trtllm_settings\n"
        "assert trtllm_settings()['TorchLlmArgs']['max_num_tokens'] == 'int | None'\n"
        "check_arguments({'max_num_tokens': 5})\n"
        "assert not {'tensorrt_llm', 'torch'} & sys.modules.keys()"
    )
    environ = {"PYTHONPATH": str(stand_in.PACKAGE_DIR), "PATH": "/usr/bin:/bin"}
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60, env=environ)
