"""A prefill/decode hand-over in vLLM's words: what is asked of the prefill side, and what is believed of its answer.

vLLM's answer goes through other processes before the decode side's vLLM gets it, and vLLM trusts it: a missing key or a block
too few ends the whole engine.  So it is looked at here first.

Both sides need the same request id, for the push connector finds the waiting decode side by it, and an id must not come twice
on a prefill side, or it would write into the memory of the first that asked.  Each prefill therefore has an id of its own, and
the decode side takes it from the answer.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed, TransferFailed

PARAMS = "kv_transfer_params"
ASK: Mapping[str, Any] = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
"""The `kv_transfer_params` of a request whose blocks are to be kept for another engine."""

EXPIRY = "remote_blocks_expiry_time"
"""Until when blocks are lent, by the lender's `time.perf_counter`; vLLM knows how that of another machine differs, and does not
begin to read blocks that are lent for less than 5 s more."""

_SUFFIX = re.compile(r"-[0-9a-f]{8}$", re.IGNORECASE)  # vLLM appends one to every id.
_NEEDED: dict[str, type] = {
    "remote_engine_id": str,
    "remote_request_id": str,
    "remote_host": str,
    "remote_port": int,
    "tp_size": int,
    "remote_num_tokens": int,
}


def lent(params: Mapping[str, Any], *, until: float) -> dict[str, Any]:
    """Return the parameters of a prefill as those with which the decode side lends its blocks."""
    return {**params, "do_remote_prefill": False, "do_remote_decode": True, EXPIRY: until}


def prefill_id(sequence_id: str) -> str:
    """Return a new request id for the prefill side."""
    return f"{sequence_id}.{secrets.token_hex(4)}"


def sequence_of(request_id: str) -> str:
    """Return the sequence id of a prefill by vLLM's id."""
    return base_id(request_id).rpartition(".")[0]


def base_id(request_id: str) -> str:
    """Return the id that vLLM was given, without vLLM's suffix."""
    return _SUFFIX.sub("", request_id)


def plain(params: Mapping[str, Any]) -> dict[str, Any]:
    """Return vLLM's parameters with JSON's types only."""
    return {str(name): _plain(value) for name, value in params.items()}


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return plain(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value


def reachable(params: Mapping[str, Any] | None) -> Mapping[str, Any]:
    """Return the parameters if they have the owner and the address of the blocks. Raises TransferFailed."""
    if params is None:
        raise TransferFailed("a hand-over without parameters")
    for name, kind in _NEEDED.items():
        if not isinstance(params.get(name), kind):
            raise TransferFailed(f"{name} is {params.get(name)!r} in the parameters of the prefill side")
    return params


def borrowed(params: Mapping[str, Any], *, prompt_tokens: int) -> dict[str, Any]:
    """Return what a prefill side's vLLM is asked when a decode side lends it a prefix of the prompt. Raises TransferFailed."""
    params = reachable(params)
    if params.get("do_remote_decode") is not True or not isinstance(params.get(EXPIRY), float):
        raise TransferFailed("the parameters of the decode side lend nothing")
    if not 0 < params["remote_num_tokens"] <= prompt_tokens:
        raise TransferFailed(f"{params['remote_num_tokens']} tokens are lent of a prompt of {prompt_tokens}")
    _check_blocks(params.get("remote_block_ids"), "decode")
    return {**ASK, **params}


def checked(params: Mapping[str, Any] | None, *, mode: str, prompt_tokens: int, block_size: int) -> dict[str, Any]:
    """Return the parameters for the decode side's vLLM. Raises TransferFailed if they do not fit a prefill of this prompt."""
    params = reachable(params)
    if params.get("do_remote_prefill") is not True:
        raise TransferFailed("the parameters of the prefill side offer nothing (do_remote_prefill is not set)")
    if params.get("transfer_mode") != mode:
        raise TransferFailed(f"the prefill side is for {params.get('transfer_mode')!r}, this side is for {mode!r}")
    tokens: int = params["remote_num_tokens"]
    # some models leave the last tokens to the decode side, never as many as a block has
    if not prompt_tokens - block_size < tokens <= prompt_tokens:
        raise TransferFailed(f"the prefill side computed {tokens} tokens, the prompt has {prompt_tokens}")
    _check_blocks(params.get("remote_block_ids"), "prefill")
    return dict(params)


def _check_blocks(groups: Any, side: str) -> None:
    if not isinstance(groups, list | tuple) or not any(groups):
        raise TransferFailed(f"remote_block_ids is {groups!r} in the parameters of the {side} side")
    for group in groups:
        if not isinstance(group, list | tuple) or not all(isinstance(block, int) for block in group):
            raise TransferFailed(f"remote_block_ids has {group!r} in the parameters of the {side} side")


# Chooses the NIXL connector that vLLM is started with, so that one engine can compute prompts and another go on from them.
#
# An engine gets a connector if its role is prefill or decode, or if `kv_transfer_mode` is given. It is started as `kv_both`,
# so that it can do either and its role may change while it runs. An operator's own `kv_transfer_config` is passed on
# unchanged, and determines the engine's roles.

Mode = Literal["push", "pull"]

MODE_ARG = "kv_transfer_mode"
DEFAULT_MODE: Mode = "push"
READS = "bidirectional_kv_xfer"
"""The setting of vLLM's pull connector with which a prefill side reads blocks of a decode side."""
LEASE_S = 30
"""Seconds for which blocks stay offered, vLLM's own default. Must be whole; a decode side renews it every sixth of it."""

EXTENSION = "headrace.workers.vllm.worker_extension.HandoverExtension"

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
