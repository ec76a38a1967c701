"""A prefill/decode hand-over in vLLM's words: what is asked of the prefill side, and what is believed of its answer.

vLLM's answer goes through other processes before the decode side's vLLM gets it, and vLLM trusts it: a missing key or a block
too few ends the whole engine.  So it is looked at here first.

Both sides need the same request id, for the push connector finds the waiting decode side by it, and an id must not come twice
on a prefill side, or it would write into the memory of the first that asked.  Each prefill therefore has an id of its own, and
the decode side takes it from the answer.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Mapping
from typing import Any

from headrace.workers.errors import TransferFailed

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
