"""Reads the settings of KV tiers and turns them into vLLM's connector for offloading. Needs no vLLM.

The host tier is the one that the device copies to and from; every other tier lies behind it, so none goes without.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from headrace.workers.engine import EngineConfig, Role
from headrace.workers.errors import EngineStartFailed
from headrace.workers.vllm.tiers.identity import settings_identity

GIB = 1 << 30

HOST_ARG = "kv_host_gib"
FOLDER_ARG = "kv_disk_folder"
DISK_ARG = "kv_disk_gib"
STORE_ARG = "kv_store"
WAIT_ARG = "kv_store_wait_s"
_BEHIND = (FOLDER_ARG, DISK_ARG, STORE_ARG, WAIT_ARG)
TIER_ARGS = (HOST_ARG, *_BEHIND)

DISK_GIB = 32.0
DISK_WAIT_S = 10.0
"""Most time that a request waits for its blocks from the disk."""
STORE_WAIT_S = 2.0

CPU_MODULE = "headrace.workers.vllm.tiers.cpu_spec"
"""The specs for engines without a GPU; vLLM's own ones refuse to start there."""
STORE_MODULE = "headrace.workers.vllm.tiers.manager"

_ACCESS = "broker-access"

_SECRET_HASHES = frozenset({"xxhash", "xxhash_cbor"})
"""vLLM begins these with a number of each start: no other engine finds a block by them."""

_OTHER_CONNECTORS = ("kv_transfer_config", "kv_transfer_mode", "kv_offloading_size")
"""vLLM's settings that choose a connector too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Disk:
    """A tier of files."""

    folder: str
    bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiers:
    """The tiers below the device of one engine."""

    host_bytes: int
    disk: Disk | None = None
    store_wait_s: float | None = None  # most time that a request waits for the broker's object store; None: no tier there

    @property
    def outlive(self) -> bool:
        """Return whether blocks are found by engines that start later."""
        return self.disk is not None or self.store_wait_s is not None


def tiers_of(args: Mapping[str, Any]) -> Tiers | None:
    """Return the tiers that the settings ask for, or None. Raises EngineStartFailed."""
    host = args.get(HOST_ARG)
    if host is None:
        for name in _BEHIND:
            if args.get(name) is not None:
                raise EngineStartFailed(f"{name} is behind the host tier: give {HOST_ARG} too")
        return None
    for other in _OTHER_CONNECTORS:
        if args.get(other) is not None:
            raise EngineStartFailed(f"{HOST_ARG} and {other} choose vLLM's connector both: give one of them")
    if args.get("enable_prefix_caching") is False:
        raise EngineStartFailed(f"{HOST_ARG} keeps what the prefix cache drops, and enable_prefix_caching=false has none")
    tiers = Tiers(host_bytes=_bytes(HOST_ARG, host), disk=_disk(args), store_wait_s=_store_wait_s(args))
    if tiers.outlive:
        _check_names_of_blocks(args)
    return tiers


def _disk(args: Mapping[str, Any]) -> Disk | None:
    folder, size = args.get(FOLDER_ARG), args.get(DISK_ARG)
    if folder is None:
        if size is not None:
            raise EngineStartFailed(f"{DISK_ARG} is the size of the files below {FOLDER_ARG}: give that too")
        return None
    if not isinstance(folder, str) or not folder.strip():
        raise EngineStartFailed(f"{FOLDER_ARG} is a folder, not {folder!r}")
    return Disk(folder=folder, bytes=_bytes(DISK_ARG, DISK_GIB if size is None else size))


def _store_wait_s(args: Mapping[str, Any]) -> float | None:
    wanted, wait_s = args.get(STORE_ARG), args.get(WAIT_ARG)
    if wanted not in (None, True, False):
        raise EngineStartFailed(f"{STORE_ARG} is true or false, not {wanted!r}")
    if not wanted:
        if wait_s is not None:
            raise EngineStartFailed(f"{WAIT_ARG} is the most that a request waits for {STORE_ARG}=true: give that too")
        return None
    if wait_s is None:
        return STORE_WAIT_S
    if isinstance(wait_s, bool) or not isinstance(wait_s, int | float) or not 0 < wait_s <= 60:
        raise EngineStartFailed(f"{WAIT_ARG} is a number of seconds above 0, 60 at most, not {wait_s!r}")
    return float(wait_s)


def prepare_tiers(config: EngineConfig, folder: Path) -> Path | None:
    """Make the folder of a disk tier, and write the file by which the tier in the broker's object store gets there.

    Returns the path of that file, which lies in `folder`, or None without such a tier. Raises EngineStartFailed.
    """
    tiers = tiers_of(config.args)
    if tiers is not None and tiers.disk is not None:
        _check_folder(Path(tiers.disk.folder).expanduser())
    if tiers is None or tiers.store_wait_s is None:
        return None
    if config.broker is None:
        raise EngineStartFailed(f"{STORE_ARG} is for the engine of a worker: this one has no broker")
    path = folder / _ACCESS
    config.broker.write(path)
    return path


def _check_folder(folder: Path) -> None:
    """Make the folder where it is absent: inside vLLM's core an error would lose its reason."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise EngineStartFailed(f"{FOLDER_ARG} {folder}: {error.strerror}") from error


def _check_names_of_blocks(args: Mapping[str, Any]) -> None:
    """Raise EngineStartFailed where vLLM's name of a block would not say all that it depends on, or not to a later engine."""
    algorithm = args.get("prefix_caching_hash_algo")
    if algorithm in _SECRET_HASHES:
        raise EngineStartFailed(f"prefix_caching_hash_algo={algorithm} gives each start names of its own: take sha256")
    if args.get("adapters") or args.get("enable_lora"):
        raise EngineStartFailed(
            "vLLM knows adapters by name and folder, whatever weights lie there: tiers that outlive an engine take none"
        )


def offload_config(config: EngineConfig, tiers: Tiers, *, cpu: bool, access: Path | None = None) -> dict[str, Any]:
    """Build vLLM's `kv_transfer_config` for these tiers. Raises EngineStartFailed for a role that hands blocks over.

    `access`: what `prepare_tiers` has returned.
    """
    if config.role is not Role.AGGREGATED:
        raise EngineStartFailed(f"{HOST_ARG} is for aggregated workers; this one has the role {config.role.value!r}")
    extra: dict[str, Any] = {"cpu_bytes_to_use": tiers.host_bytes}
    behind = [_disk_tier(config, tiers.disk)] if tiers.disk is not None else []
    if tiers.store_wait_s is not None:
        behind.append(_tier(config, "store", wait_s=tiers.store_wait_s) | {"access": str(access)})
    if behind:
        extra["secondary_tiers"] = behind
    if cpu:
        extra |= {"spec_name": "CpuTieredSpec" if behind else "CpuHostSpec", "spec_module_path": CPU_MODULE}
    elif behind:
        extra["spec_name"] = "TieringOffloadingSpec"
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "engine_id": uuid.uuid4().hex,
        "kv_connector_extra_config": extra,
    }


def _disk_tier(config: EngineConfig, disk: Disk) -> dict[str, Any]:
    return _tier(config, "disk", wait_s=DISK_WAIT_S) | {"folder": disk.folder, "max_bytes": disk.bytes}


def _tier(config: EngineConfig, kind: str, *, wait_s: float) -> dict[str, Any]:
    return {
        "type": kind,
        "module_path": STORE_MODULE,
        "model": config.model,
        "revision": config.args.get("revision"),
        "settings": settings_identity(config.args, without=TIER_ARGS),
        "wait_s": wait_s,
    }


def _bytes(name: str, value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1 << 20:
        raise EngineStartFailed(f"{name} is a number of GiB above 0, not {value!r}")
    return int(value * GIB)
