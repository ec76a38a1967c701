"""Checks that a model can be there before an engine is imported, which takes seconds, and tries minutes for a wrong one."""

from __future__ import annotations

import json
import re
import socket
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.workers.errors import EngineStartFailed

HUB = "https://huggingface.co"

_PATH_STARTS = ("/", "./", "../", "~")
_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(:[\w.-]+)?\Z")  # the last part names a file type of GGUF
_CONFIGURED_BY = ("config.json", "params.json")
_ON = frozenset({"1", "on", "true", "yes"})
_OTHER_HUBS = ("VLLM_USE_MODELSCOPE", "SGLANG_USE_MODELSCOPE")  # the engine does not ask Hugging Face then
_TIMEOUT_S = 5.0


def check_model_path(model: str) -> None:
    """Raise EngineStartFailed for a folder that is not there or holds no model, and for what can be neither folder nor id."""
    path = Path(model)
    if path.is_dir():
        if not any((path / name).is_file() for name in _CONFIGURED_BY) and not any(path.glob("*.gguf")):
            raise EngineStartFailed(f"the folder {path.resolve()} holds no model: it has no config.json")
    elif path.exists() or "://" in model:
        return
    elif model.startswith(_PATH_STARTS):
        raise EngineStartFailed(f"there is no folder {path.resolve()}")
    elif not _ID.match(model):
        raise EngineStartFailed(f"this is no Hugging Face id (organisation/name), and there is no folder {path.resolve()}")


def check_hub_model(model: str, args: Mapping[str, Any], environ: Mapping[str, str], *, timeout_s: float = _TIMEOUT_S) -> None:
    """Raise EngineStartFailed for a Hugging Face id that is not in the cache and that the hub does not have or give.

    Any other answer of the hub, and a certificate that cannot be verified here, is left to the engine.
    """
    if Path(model).exists() or "://" in model or any(environ.get(name, "").lower() in _ON for name in _OTHER_HUBS):
        return
    name = model.partition(":")[0]
    cache = _cache(environ)
    if any(_cached(folder, name) for folder in (cache, Path(str(args.get("download_dir") or cache)))):
        return
    for variable in ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"):
        if environ.get(variable, "").lower() in _ON:
            raise EngineStartFailed(f"it is not in the cache {cache}, and {variable} is set")
    hub = environ.get("HF_ENDPOINT", HUB).rstrip("/")
    token = _token(environ)
    request = urllib.request.Request(  # noqa: S310  # the operator's own address, or the hub's
        f"{hub}/api/models/{name}", headers={"Authorization": f"Bearer {token}"} if token else {}
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout_s) as answer:  # noqa: S310  # the same
            about = json.load(answer)
    except urllib.error.HTTPError as error:
        error.close()
        if error.code in (401, 404):
            hint = "the token given does not open it" if token else "it is private, and HF_TOKEN is needed"
            raise EngineStartFailed(f"{hub} has no such model, or {hint}") from None
        return
    except (OSError, ValueError) as error:
        why = getattr(error, "reason", error)
        if isinstance(why, ConnectionError | TimeoutError | socket.gaierror):
            text = getattr(why, "strerror", None) or str(why) or "no answer"
            raise EngineStartFailed(f"it is not in the cache {cache}, and {hub} cannot be reached: {text}") from None
        return
    if isinstance(about, dict) and about.get("gated") and not token:
        raise EngineStartFailed(f"it is gated: accept its terms at {hub}/{name}, and give HF_TOKEN")


def hub_folder(model: str, args: Mapping[str, Any], environ: Mapping[str, str]) -> Path | None:
    """Return where the files of a Hugging Face id are kept, None for a model that is no such id."""
    if Path(model).exists() or "://" in model:
        return None
    return _folder(Path(str(args.get("download_dir") or _cache(environ))), model.partition(":")[0])


def _folder(cache: Path, name: str) -> Path:
    return cache / f"models--{name.replace('/', '--')}"


def _cached(cache: Path, name: str) -> bool:
    snapshots = _folder(cache, name) / "snapshots"
    return any((folder / file).exists() for folder in snapshots.glob("*") for file in _CONFIGURED_BY) or any(
        snapshots.glob("*/*.gguf")
    )


def _cache(environ: Mapping[str, str]) -> Path:
    return Path(environ.get("HF_HUB_CACHE") or _home(environ) / "hub").expanduser()


def _home(environ: Mapping[str, str]) -> Path:
    root = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(environ.get("HF_HOME") or Path(root) / "huggingface").expanduser()


def _token(environ: Mapping[str, str]) -> str:
    given = environ.get("HF_TOKEN")
    if given is not None:
        return given.strip()
    try:
        return Path(environ.get("HF_TOKEN_PATH") or _home(environ) / "token").expanduser().read_text().strip()
    except (OSError, ValueError):
        return ""
