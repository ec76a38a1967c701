"""Recognises the connectors of other projects in an operator's `kv_transfer_config`, and says before the start what they lack.

What is recognised is passed on unchanged, as everything else is: vLLM loads them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from typing import Any

from headrace.workers.errors import EngineStartFailed

LMCACHE = frozenset({"LMCacheConnectorV1", "LMCacheMPConnector"})
KVBM = frozenset({"DynamoConnector", "PdConnector"})
KVBM_MODULE = "kvbm.vllm_integration.connector"
_WRAPPERS = frozenset({"MultiConnector", "PdConnector"})

OFFLOADING = "OffloadingConnector"
_CPU_MODULE = "headrace.workers.vllm.cpu_offload"
_CPU_SPECS = {"CPUOffloadingSpec": "CpuHostSpec", "TieringOffloadingSpec": "CpuTieredSpec"}


def check_connectors(args: Mapping[str, Any], *, cpu: bool) -> None:
    """Raise EngineStartFailed for a connector whose package is not installed, or that is known not to work here."""
    if args.get("kv_offloading_size") is not None and args.get("kv_offloading_backend") == "lmcache":
        _check("LMCacheMPConnector", {}, cpu=cpu)
    for name, config in _named(args.get("kv_transfer_config")):
        _check(name, config, cpu=cpu)


def offload_without_gpu(args: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings with which vLLM's own offloading works without a GPU; none where it is not asked for.

    Its specs refuse to start there, so the ones of `cpu_offload` take their place. All else stays as the operator gave it.
    """
    config = args.get("kv_transfer_config")
    if config is None and args.get("kv_offloading_size") is not None and args.get("kv_offloading_backend") in (None, "native"):
        config = {"kv_connector": OFFLOADING, "kv_role": "kv_both"}
    if not isinstance(config, Mapping) or config.get("kv_connector") != OFFLOADING:
        return {}
    extra = dict(config.get("kv_connector_extra_config") or {})
    if ours := _CPU_SPECS.get(extra.get("spec_name", "CPUOffloadingSpec")):
        extra |= {"spec_name": ours, "spec_module_path": _CPU_MODULE}
    return {"kv_transfer_config": {**config, "kv_connector_extra_config": extra}}


def _named(config: Any) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Iterate over a connector and those inside it. What is no such configuration is left to vLLM."""
    if not isinstance(config, Mapping) or not isinstance(name := config.get("kv_connector"), str):
        return
    yield name, config
    extra = config.get("kv_connector_extra_config")
    inner = extra.get("connectors") if name in _WRAPPERS and isinstance(extra, Mapping) else ()
    for one in inner if isinstance(inner, list | tuple) else ():
        yield from _named(one)


def _check(name: str, config: Mapping[str, Any], *, cpu: bool) -> None:
    if name in LMCACHE:
        _need("lmcache", name)
        if cpu and name == "LMCacheConnectorV1":  # seen with LMCache 0.5.6
            raise EngineStartFailed(
                f"{name} does nothing without a GPU but make each request wait for a time-out; kv_offloading_size is for that"
            )
    if name in KVBM:
        if config.get("kv_connector_module_path") is None:
            raise EngineStartFailed(f"vLLM loads {name} by a path: give kv_connector_module_path={KVBM_MODULE!r} with it")
        _need("kvbm", name)


def _need(package: str, connector: str) -> None:
    if find_spec(package) is None:
        raise EngineStartFailed(
            f"{connector} is in the Python package {package}, which is not installed: pip install {package}"
        )
