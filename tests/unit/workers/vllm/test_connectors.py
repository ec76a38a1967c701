"""Connectors of other projects are recognised before a model is loaded, and everything else is vLLM's matter."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm import connectors
from headrace.workers.vllm.connectors import KVBM_MODULE, check_connectors

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
    with pytest.raises(EngineStartFailed, match="kv_host_gib is for that"):
        check_connectors({"kv_transfer_config": LMCACHE}, cpu=True)
    check_connectors({"kv_transfer_config": LMCACHE | {"kv_connector": "LMCacheMPConnector"}}, cpu=True)


@pytest.mark.parametrize(
    "config", [None, "text", {}, {"kv_connector": None}, {"kv_connector": "Another"}, inside("MultiConnector", None, "text")]
)
def test_everything_else_is_left_to_vllm(installed: set[str], config: Any) -> None:
    check_connectors({"kv_transfer_config": config, "kv_offloading_size": 1.0}, cpu=True)
