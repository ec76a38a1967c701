"""Chooses the NIXL connector that vLLM is started with, so that one engine can compute prompts and another go on from them.

An engine gets a connector if its role is prefill or decode, or if `kv_transfer_mode` is given. It is started as `kv_both`, so
that it can do either and its role may change while it runs. An operator's own `kv_transfer_config` is passed on unchanged, and
determines the engine's roles.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed

Mode = Literal["push", "pull"]

MODE_ARG = "kv_transfer_mode"
DEFAULT_MODE: Mode = "push"
READS = "bidirectional_kv_xfer"
"""The setting of vLLM's pull connector with which a prefill side reads blocks of a decode side."""
LEASE_S = 30
"""Seconds for which blocks stay offered, vLLM's own default. Must be whole; a decode side renews it every sixth of it."""

EXTENSION = "headrace.workers.vllm.transfer.worker_extension.HandoverExtension"

_CONNECTORS: dict[Mode, str] = {"push": "NixlPushConnector", "pull": "NixlConnector"}
_MODES: dict[str, Mode] = {"NixlPushConnector": "push", "NixlConnector": "pull", "NixlPullConnector": "pull"}
_ROLES = {
    "kv_both": frozenset({Role.AGGREGATED, Role.PREFILL, Role.DECODE}),
    "kv_producer": frozenset({Role.AGGREGATED, Role.PREFILL}),
    "kv_consumer": frozenset({Role.AGGREGATED, Role.DECODE}),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class ConnectorChoice:
    """The connector of a started engine."""

    mode: Mode
    roles: frozenset[Role]
    lease_s: float
    extended: bool = True  # whether vLLM's workers have Headrace's extension, which an operator's own one replaces
    reads: bool = False  # whether its prefill side can read blocks that a decode side lends

    @property
    def lends(self) -> bool:
        """True when its decode side can lend blocks: the push connector has no way to read them."""
        return self.mode == "pull" and self.extended and Role.DECODE in self.roles


def chosen_mode(args: Mapping[str, Any]) -> Mode | None:
    """Return the operator's `kv_transfer_mode`, or None. Raises EngineStartFailed."""
    mode = args.get(MODE_ARG)
    if mode is not None and mode not in _CONNECTORS:
        raise EngineStartFailed(f"{MODE_ARG} is {' or '.join(_CONNECTORS)}, not {mode!r}")
    return cast("Mode | None", mode)


def connector_config(config: EngineConfig, *, cpu: bool) -> dict[str, Any] | None:
    """Build vLLM's `kv_transfer_config`, or None if none is needed or the operator gave one. Raises EngineStartFailed."""
    if config.role is Role.ENCODE:  # it has no KV cache
        return None
    if config.role not in _ROLES["kv_both"]:
        raise EngineStartFailed(f"the vLLM adapter does not serve the role {config.role.value!r}")
    mode = chosen_mode(config.args)
    if config.args.get("kv_transfer_config") is not None:
        if mode is not None:
            raise EngineStartFailed(f"{MODE_ARG} and kv_transfer_config name the connector both: give one of them")
        return None
    if config.role is Role.AGGREGATED and mode is None:
        return None
    settings: dict[str, Any] = {
        "kv_connector": _CONNECTORS[mode or DEFAULT_MODE],
        "kv_role": "kv_both",
        "engine_id": uuid.uuid4().hex,
        # A failed transfer must be reported: the worker then computes the prompt itself and counts that.
        "kv_load_failure_policy": "fail",
        "kv_connector_extra_config": {"kv_lease_duration": LEASE_S},
    }
    if config.role is Role.PREFILL and mode == "pull":
        # vLLM also means to keep the blocks of ended answers for the sender of the next turn, 480 s: not here
        settings["kv_connector_extra_config"] |= {READS: True, "decoder_kv_blocks_ttl": 1}
    if cpu:
        settings["kv_buffer_device"] = "cpu"
    return settings


def describe_transfer(vllm_config: Any) -> ConnectorChoice | None:
    """Describe the connector of an engine with this configuration, or return None if it cannot hand over."""
    config = vllm_config.kv_transfer_config
    if config is None or config.kv_connector is None:
        return None
    settings, role = config.kv_connector_extra_config or {}, config.kv_role
    name = config.kv_connector
    if name == "MultiConnector":
        inner: dict[str, Any] = next(
            (entry for entry in settings.get("connectors", ()) if entry.get("kv_connector") in _MODES), {}
        )
        name, role = inner.get("kv_connector"), inner.get("kv_role", role)
        settings = inner.get("kv_connector_extra_config") or {}
    if name not in _MODES:
        return None
    return ConnectorChoice(
        mode=_MODES[name],
        roles=_ROLES[role],
        lease_s=float(settings.get("kv_lease_duration", LEASE_S)),
        extended=vllm_config.parallel_config.worker_extension_cls == EXTENSION,
        reads=_MODES[name] == "pull" and bool(settings.get(READS)),
    )


def check_role(role: Role, transfer: ConnectorChoice | None, connector: str | None) -> None:
    """Raise EngineStartFailed if an engine that was configured so cannot serve this role."""
    if role in (Role.AGGREGATED, Role.ENCODE):
        return
    if transfer is None:
        known = ", ".join(_CONNECTORS.values())
        raise EngineStartFailed(
            f"role {role.value!r} needs one of the connectors {known}; kv_transfer_config has {connector!r}"
        )
    if role not in transfer.roles:
        able = ", ".join(sorted(transfer.roles))
        raise EngineStartFailed(f"with its kv_role in kv_transfer_config this engine can be {able}, not {role.value}")


def handover_word(mode: Mode, version: str, vllm_config: Any) -> str:
    """Return a word that is equal for engines that vLLM lets work together.

    It has the mode, vLLM's version, the type of the numbers, the block size, and a digest. The digest is over the
    rest of what vLLM compares at their first contact; the model's name or path is in it as it was given.
    """
    model, cache, parallel = vllm_config.model_config, vllm_config.cache_config, vllm_config.parallel_config
    rest = (
        model.model,
        str(cache.cache_dtype),
        model.get_num_layers(parallel),
        model.get_total_num_kv_heads(),
        model.get_head_size(),
    )
    digest = hashlib.sha256(repr(rest).encode()).hexdigest()[:8]
    return f"vllm/{mode}/{version}/{str(model.dtype).removeprefix('torch.')}/{cache.block_size}/{digest}"
