"""Settings reach vLLM unchanged or stop the start with a word that helps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from headrace.workers.engine import EngineConfig
from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm import settings
from headrace.workers.vllm.settings import (
    KVBM_MODULE,
    check_compiler,
    check_connectors,
    computes_in_core,
    kv_events_wanted,
    offload_without_gpu,
    prepare_environment,
)


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


KVBM = {"kv_connector": "DynamoConnector", "kv_connector_module_path": KVBM_MODULE, "kv_role": "kv_both"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    there: set[str] = set()
    monkeypatch.setattr(settings, "find_spec", lambda name: object() if name in there else None)
    return there


def inside(wrapper: str, *configs: Any) -> dict[str, Any]:
    return {
        "kv_connector": wrapper,
        "kv_connector_module_path": "x",
        "kv_connector_extra_config": {"connectors": list(configs)},
    }


@pytest.mark.parametrize(
    ("args", "package"),
    [
        ({"kv_transfer_config": LMCACHE}, "lmcache"),
        ({"kv_transfer_config": LMCACHE | {"kv_connector": "LMCacheMPConnector"}}, "lmcache"),
        ({"kv_transfer_config": inside("MultiConnector", {"kv_connector": "NixlConnector"}, LMCACHE)}, "lmcache"),
        ({"kv_offloading_size": 4.0, "kv_offloading_backend": "lmcache"}, "lmcache"),
        ({"kv_transfer_config": KVBM}, "kvbm"),
        ({"kv_transfer_config": inside("MultiConnector", KVBM)}, "kvbm"),
        ({"kv_transfer_config": inside("PdConnector", {"kv_connector": "NixlConnector"})}, "kvbm"),
    ],
)
def test_a_connector_whose_package_is_absent_names_it(installed: set[str], args: dict[str, Any], package: str) -> None:
    with pytest.raises(EngineStartFailed, match=f"pip install {package}$"):
        check_connectors(args, cpu=False)
    installed.add(package)
    check_connectors(args, cpu=False)


def test_kvbm_without_its_path_is_told_which(installed: set[str]) -> None:
    with pytest.raises(EngineStartFailed, match=r"kv_connector_module_path='kvbm\.vllm_integration\.connector'"):
        check_connectors({"kv_transfer_config": {"kv_connector": "DynamoConnector"}}, cpu=False)


def test_lmcache_without_a_gpu_is_refused_with_what_works_there(installed: set[str]) -> None:
    installed.add("lmcache")
    with pytest.raises(EngineStartFailed, match="kv_offloading_size is for that"):
        check_connectors({"kv_transfer_config": LMCACHE}, cpu=True)
    check_connectors({"kv_transfer_config": LMCACHE | {"kv_connector": "LMCacheMPConnector"}}, cpu=True)


@pytest.mark.parametrize(
    "config", [None, "text", {}, {"kv_connector": None}, {"kv_connector": "Another"}, inside("MultiConnector", None, "text")]
)
def test_everything_else_is_left_to_vllm(installed: set[str], config: Any) -> None:
    check_connectors({"kv_transfer_config": config, "kv_offloading_size": 1.0}, cpu=True)


def offloading(**extra: Any) -> dict[str, Any]:
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


@pytest.mark.parametrize(
    ("args", "spec"),
    [
        ({"kv_offloading_size": 1.0}, "CpuHostSpec"),
        ({"kv_offloading_size": 1.0, "kv_transfer_config": None, "kv_offloading_backend": "native"}, "CpuHostSpec"),
        ({"kv_transfer_config": offloading(cpu_bytes_to_use=1)}, "CpuHostSpec"),
        ({"kv_transfer_config": offloading(spec_name="CPUOffloadingSpec")}, "CpuHostSpec"),
        ({"kv_transfer_config": offloading(spec_name="TieringOffloadingSpec", secondary_tiers=[])}, "CpuTieredSpec"),
    ],
)
def test_offloading_without_a_gpu_has_specs_that_start_there_and_all_else_as_given(args: dict[str, Any], spec: str) -> None:
    config = offload_without_gpu(args)["kv_transfer_config"]
    extra = config.pop("kv_connector_extra_config")
    assert config == {"kv_connector": "OffloadingConnector", "kv_role": "kv_both"}
    given = (args.get("kv_transfer_config") or {}).get("kv_connector_extra_config", {})
    assert extra == given | {"spec_name": spec, "spec_module_path": "headrace.workers.vllm.cpu_offload"}


@pytest.mark.parametrize(
    "args",
    [
        {},
        {"kv_transfer_config": LMCACHE},
        {"kv_offloading_size": 1.0, "kv_offloading_backend": "lmcache"},
        {"kv_transfer_config": "text"},
    ],
)
def test_nothing_is_added_where_vllm_does_not_offload_itself(args: dict[str, Any]) -> None:
    assert offload_without_gpu(args) == {}


def test_a_spec_of_an_operator_stays() -> None:
    config = offloading(spec_name="Mine", spec_module_path="mine")
    assert offload_without_gpu({"kv_transfer_config": config}) == {"kv_transfer_config": config}


@pytest.fixture
def programs(tmp_path: Path) -> Path:
    folder = tmp_path / "bin"
    folder.mkdir()
    return folder


def environment(programs: Path, tmp_path: Path, **more: str) -> dict[str, str]:
    return {"PATH": str(programs), "TRITON_CACHE_DIR": str(tmp_path / "triton"), **more}


def provide(programs: Path, name: str) -> None:
    (programs / name).write_text("#!/bin/sh\n")
    (programs / name).chmod(0o755)


@pytest.mark.parametrize(
    ("cpu", "args", "fails"),
    [
        (True, {}, None),
        (True, {"enforce_eager": True}, None),
        (True, {"enforce_eager": False}, r"g\+\+"),
        (False, {}, "gcc or clang"),
        (False, {"enforce_eager": False}, "gcc or clang"),
        (False, {"enforce_eager": True}, None),
    ],
)
def test_a_compiler_is_missed_where_one_is_used(
    monkeypatch: pytest.MonkeyPatch, programs: Path, tmp_path: Path, cpu: bool, args: dict[str, Any], fails: str | None
) -> None:
    monkeypatch.setattr(settings, "_is_cpu_build", lambda: cpu)
    environ = environment(programs, tmp_path)
    if fails is None:
        check_compiler(args, environ)
        return
    with pytest.raises(EngineStartFailed, match=fails):
        check_compiler(args, environ)
    provide(programs, "g++" if cpu else "clang")
    check_compiler(args, environ)


def test_the_compiler_that_a_variable_names_counts(monkeypatch: pytest.MonkeyPatch, programs: Path, tmp_path: Path) -> None:
    provide(programs, "gcc")
    provide(programs, "mine")
    for cpu, variable in ((True, "CXX"), (False, "CC")):
        monkeypatch.setattr(settings, "_is_cpu_build", lambda cpu=cpu: cpu)
        args = {"enforce_eager": False}
        check_compiler(args, environment(programs, tmp_path, **{variable: "mine -O2"}))
        with pytest.raises(EngineStartFailed):
            check_compiler(args, environment(programs, tmp_path, **{variable: "theirs"}))


def test_what_triton_has_compiled_before_needs_no_compiler(
    monkeypatch: pytest.MonkeyPatch, programs: Path, tmp_path: Path
) -> None:
    monkeypatch.setattr(settings, "_is_cpu_build", lambda: False)
    (tmp_path / "triton" / "abc").mkdir(parents=True)
    (tmp_path / "triton" / "abc" / "launcher.so").write_bytes(b"")
    check_compiler({}, environment(programs, tmp_path))
