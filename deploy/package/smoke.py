"""Tries an installed Headrace with its own Python: imports every module, serves with the simulator, asks, and stops.

`python -P deploy/package/smoke.py FOLDER` works in a new folder below FOLDER. What needs an engine's packages is left out.
"""

from __future__ import annotations

import importlib
import json
import pkgutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

START_S = 60.0
STOP_S = 30.0
ENGINES = (
    "headrace.workers.vllm",
    "headrace.workers.sglang",
    "headrace.workers.kv.zmq_listener",
    "headrace.workers.kv.zmq_listener",
    "headrace.workers.nixl",
    "headrace.workers.model_files",
)
COMMAND = [sys.executable, "-P", "-m", "headrace"]


def import_all() -> int:
    """Import all modules but those of engines. Returns how many there are."""
    import headrace

    names = [module.name for module in pkgutil.walk_packages(headrace.__path__, "headrace.", onerror=_raise)]
    chosen = [name for name in names if not name.startswith(ENGINES) and not name.endswith("__main__")]
    for name in chosen:
        importlib.import_module(name)
    return len(chosen)


def serve(folder: Path) -> str:
    """Run `headrace up`, ask it one question, find it by `worker status`, and stop it. Returns the answer."""
    log = folder / "log"
    with log.open("wb") as output:
        up = subprocess.Popen([*COMMAND, "up", "--engine", "sim", "--port", "0"], cwd=folder, stdout=output, stderr=output)
    try:
        url = _until_ready(up, folder / ".headrace" / "run" / "up.json", log)
        body = {"model": "sim", "messages": [{"role": "user", "content": "Say hello."}], "max_tokens": 8}
        request = urllib.request.Request(  # our own server
            f"{url}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            said: str = json.load(answer)["choices"][0]["message"]["content"]
        subprocess.run([*COMMAND, "worker", "status"], cwd=folder, stdout=subprocess.DEVNULL, timeout=30, check=True)
        up.send_signal(signal.SIGTERM)
        if up.wait(STOP_S) != 0:
            raise SystemExit(f"up ended with code {up.returncode}:\n{log.read_text()[-3000:]}")
        return said
    finally:
        if up.poll() is None:
            up.kill()
            up.wait()


def _until_ready(up: subprocess.Popen[bytes], run_file: Path, log: Path) -> str:
    deadline = time.monotonic() + START_S
    while time.monotonic() < deadline and up.poll() is None:
        try:
            state = json.loads(run_file.read_text())
        except (OSError, ValueError):
            state = {}
        if state.get("ready"):
            return str(state["url"])
        time.sleep(0.05)
    raise SystemExit(f"not ready in {START_S:g} s:\n{log.read_text()[-3000:]}")


def _raise(name: str) -> None:
    if not name.startswith(ENGINES):
        raise ImportError(f"{name} cannot be imported")


def main(arguments: list[str]) -> int:
    """Try this interpreter's Headrace in a folder of its own."""
    if [word for word in sys.path if (Path(word) / "pyproject.toml").exists()]:
        raise SystemExit("the source tree is on the import path: this would not try what is installed")
    modules = import_all()
    subprocess.run([*COMMAND, "--version"], stdout=subprocess.DEVNULL, timeout=30, check=True)
    said = serve(Path(tempfile.mkdtemp(dir=arguments[0])))
    print(f"{modules} modules imported, answered: {said!r}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
