"""Connectors of other projects are recognised before a model is loaded, and everything else is vLLM's matter."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm import connectors
from headrace.workers.vllm.connectors import KVBM_MODULE, check_connectors, offload_without_gpu

KVBM = {"kv_connector": "DynamoConnector", "kv_connector_module_path": KVBM_MODULE, "kv_role": "kv_both"}
LMCACHE = {"kv_connector": "LMCacheConnectorV1", "kv_role": "kv_both"}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> set[str]:
    there: set[str] = set()
    monkeypatch.setattr(connectors, "find_spec", lambda name: object() if name in there else None)
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
