"""Reads what matters of this machine, for `headrace doctor`. Imports no engine."""

from __future__ import annotations

import os
import resource
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

from headrace.commands.info import versions
from headrace.doctor.facts import MachineFacts
from headrace.workers.errors import EngineStartFailed


def read_machine(data_dir: Path) -> MachineFacts:
    """Return the facts of this machine. Reads, and changes nothing; takes well under a second."""
    soft, _hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MachineFacts(
        data_dir=str(data_dir),
        data_free=_free(data_dir),
        data_mode=data_dir.stat().st_mode & 0o7777 if data_dir.is_dir() else None,
        open_files=1 << 20 if soft == resource.RLIM_INFINITY else soft,
        shared_memory=_total(Path("/dev/shm")),  # noqa: S108  # its size is read
        nats_server=versions()["nats-server"],
        engines={name: lacks for name, check in _ENGINES.items() if (lacks := check()) != _ABSENT},
    )


_ABSENT = "absent"


def _vllm() -> str | None:
    from headrace.workers.vllm.installed_check import check_compiler, check_packages

    return _state("vllm", lambda: check_packages("torch", "vllm"), lambda: check_compiler({}, os.environ))


def _sglang() -> str | None:
    from headrace.workers.sglang.installed_check import check_packages

    return _state("sglang", check_packages)


def _state(module: str, *checks: Callable[[], None]) -> str | None:
    """Return None for an engine that could start, `_ABSENT`, or what it lacks."""
    if find_spec(module) is None:
        return _ABSENT
    try:
        for check in checks:
            check()
    except EngineStartFailed as error:
        return str(error)
    return None


_ENGINES: dict[str, Callable[[], str | None]] = {"vllm": _vllm, "sglang": _sglang}


def _free(folder: Path) -> int | None:
    """Return the free bytes of the disk that holds a folder, or of the one on which it would be made."""
    while not folder.exists() and folder != folder.parent:
        folder = folder.parent
    try:
        return shutil.disk_usage(folder).free
    except OSError:
        return None


def _total(folder: Path) -> int | None:
    try:
        return shutil.disk_usage(folder).total
    except OSError:
        return None
