"""Settings reach vLLM unchanged or stop the start with a word that helps."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm.settings import check_names, computes_in_core, kv_events_wanted, prepare_environment

KNOWN = ["block_size", "max_model_len", "max_num_seqs", "enforce_eager"]


def test_an_unknown_setting_is_named_with_what_is_spelt_like_it() -> None:
    with pytest.raises(EngineStartFailed, match=r"no setting 'max-model-length'; close to it: max_model_len"):
        check_names({"max-model-length": 1}, KNOWN)


def test_an_unknown_setting_like_no_other_is_named_alone() -> None:
    with pytest.raises(EngineStartFailed, match=r"no setting 'zzz'$"):
        check_names({"zzz": 1}, KNOWN)


def test_a_setting_with_an_option_of_its_own_is_refused() -> None:
    with pytest.raises(EngineStartFailed, match="give 'model' as --model"):
        check_names({"model": "x"}, [*KNOWN, "model"])


def test_known_settings_pass() -> None:
    check_names({"block_size": 64, "enforce_eager": False}, KNOWN)


def test_the_operators_environment_wins() -> None:
    environ = {"OMP_NUM_THREADS": "7", "VLLM_LOGGING_LEVEL": "DEBUG"}
    prepare_environment(EngineConfig(model="some/model", served_name="m"), environ)
    assert environ["OMP_NUM_THREADS"] == "7"
    assert environ["VLLM_LOGGING_LEVEL"] == "DEBUG"
    assert environ["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert environ["VLLM_WORKER_MULTIPROC_METHOD"] == "spawn"
    assert environ["VLLM_NO_USAGE_STATS"] == "1"


def test_a_model_on_disk_needs_no_hub(tmp_path: Path) -> None:
    local: dict[str, str] = {}
    prepare_environment(EngineConfig(model=str(tmp_path), served_name="m"), local)
    assert local["HF_HUB_OFFLINE"] == "1"
    remote: dict[str, str] = {}
    prepare_environment(EngineConfig(model="some/model", served_name="m"), remote)
    assert "HF_HUB_OFFLINE" not in remote


@pytest.mark.parametrize(
    ("args", "bind", "ranks", "alone"),
    [
        ({}, "nobind", 1, True),
        ({}, "nobind", 2, False),
        ({}, "auto", 1, False),  # vLLM binds the threads of its processes
        ({}, "0-3", 1, False),
        ({"distributed_executor_backend": "mp"}, "nobind", 1, False),  # the operator's word
        ({"distributed_executor_backend": None}, "nobind", 1, True),
    ],
)
def test_without_a_gpu_the_core_computes_by_itself_where_nothing_is_gained_by_more_processes(
    args: dict[str, object], bind: str, ranks: int, alone: bool
) -> None:
    config = EngineConfig(model="m", served_name="m", args=args)
    assert computes_in_core(config, {"VLLM_CPU_OMP_THREADS_BIND": bind}, ranks=ranks) is alone


@pytest.mark.parametrize(
    ("args", "wanted"),
    [
        ({}, True),
        ({"enable_prefix_caching": True, "data_parallel_size": 1}, True),
        ({"kv_events_config": None}, False),  # switched off
        ({"kv_events_config": {"publisher": "zmq"}}, False),  # the operator's own
        ({"enable_prefix_caching": False}, False),
        ({"data_parallel_size": 2}, True),  # a cache and a socket per rank
        ({"data_parallel_size": 2, "data_parallel_rank": 1}, True),  # one rank of several engines: its own cache
        ({"data_parallel_size": 4, "data_parallel_rank": 0, "data_parallel_size_local": 2}, False),
        ({"data_parallel_size": 4, "data_parallel_start_rank": 2, "data_parallel_hybrid_lb": True}, False),
        ({"data_parallel_size": 4, "data_parallel_size_local": 2}, False),  # some on another machine
    ],
)
def test_cache_events_are_on_unless_the_operator_or_the_shape_of_the_engine_is_against_it(
    args: dict[str, object], wanted: bool
) -> None:
    assert kv_events_wanted(EngineConfig(model="m", served_name="m", args=args)) is wanted


@pytest.mark.parametrize(
    ("args", "level"),
    [
        ({}, "WARNING"),
        ({"disable_log_stats": True}, "WARNING"),
        ({"disable_log_stats": False}, "INFO"),
        ({"enable_log_requests": True}, "INFO"),
    ],
)
def test_vllm_may_speak_where_its_log_lines_were_asked_for(args: dict[str, object], level: str) -> None:
    environ: dict[str, str] = {}
    prepare_environment(EngineConfig(model="some/model", served_name="m", args=args), environ)
    assert environ["VLLM_LOGGING_LEVEL"] == level
