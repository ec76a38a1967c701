"""Runs the demo's deployment: `headrace up` with two simulated workers, in a temporary folder and on free ports.

It is a process of its own, in a session of its own, so that Ctrl-C reaches the demo alone. The kernel kills it when the demo
dies, and all its parts with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from headrace.base.errors import StartFailed
from headrace.up.process import SUPERVISOR_PID, headrace_command, kill_group
from headrace.up.runfile import run_file_of

MODEL = "sim"
WORKERS = 2
_START_S = 60.0
_STOP_S = 10.0
_POLL_S = 0.02
_TAIL_LINES = 10


class DemoDeployment:
    """A deployment that answers from the start of the `with` block on. After the block nothing of it is left."""

    def __init__(self, *, token_s: float) -> None:
        """`token_s`: how long the simulated engine takes for a token."""
        self._token_s = token_s
        self.url = ""

    def __enter__(self) -> Self:
        with contextlib.ExitStack() as stack:
            self._folder = Path(
                stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-demo-", ignore_cleanup_errors=True))
            )
            self._log = self._folder / "log"
            self._process = self._start()
            stack.callback(self._stop)
            self._until("it is ready", self._ready)
            self._stack = stack.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._stack.close()

    def kill(self, worker: str) -> tuple[str, int]:
        """Kill a worker with SIGKILL. Returns its short name and its pid. Raises StartFailed if it does not run."""
        for part in self._run_file()["workers"]:
            if worker.startswith(f"{part['name']}-") and part["pid"] is not None:
                os.kill(part["pid"], signal.SIGKILL)
                return part["name"], part["pid"]
        raise StartFailed(f"no process of worker {worker!r} runs")

    def answered(self, request_id: str) -> dict[str, Any]:
        """Wait for the log line of an answer and return its fields. Raises StartFailed if there is none in time."""
        found: list[dict[str, Any]] = []

        def logged() -> bool:
            found[:] = [event for event in self._events("request.answered") if event["request_id"] == request_id]
            return bool(found)

        self._until(f"request {request_id} is logged", logged)
        return found[0]

    def _start(self) -> subprocess.Popen[bytes]:
        command = headrace_command(
            *("up", "--engine", "sim", "--workers", str(WORKERS), "--routers", "1", "--port", "0", "--no-console")
        )
        command += ["--data-dir", str(self._folder), "--served-name", MODEL, "--log-format", "json", "--grace", "1"]
        command += ["--engine-arg", "timing_overrides=" + json.dumps({"decode_base_s": self._token_s})]
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        with self._log.open("wb") as log:
            return subprocess.Popen(
                command,
                cwd=self._folder,
                env={**environment, SUPERVISOR_PID: str(os.getpid())},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_S)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            kill_group(self._process.pid)  # its parts die with it
            self._process.wait()

    def _ready(self) -> bool:
        state = self._run_file()
        self.url = state["url"]
        with urllib.request.urlopen(f"{self.url}/health", timeout=1) as answer:  # noqa: S310 - http, of our own
            workers: int = json.load(answer)["models"][MODEL]["workers"]
        return bool(state["ready"]) and workers == WORKERS and any(self._events("router.ready"))

    def _run_file(self) -> dict[str, Any]:
        state: dict[str, Any] = json.loads(run_file_of(self._folder).read_bytes())
        return state

    def _events(self, name: str) -> Iterator[dict[str, Any]]:
        for line in self._log.read_text(errors="replace").splitlines():
            with contextlib.suppress(ValueError):
                event = json.loads(line)
                if isinstance(event, dict) and event.get("event") == name:
                    yield event

    def _until(self, what: str, met: Callable[[], bool]) -> None:
        deadline = time.monotonic() + _START_S
        while True:
            with contextlib.suppress(OSError, ValueError, LookupError):
                if met():
                    return
            if (code := self._process.poll()) is not None:
                raise StartFailed(f"`headrace up` ended with {code} before {what}:\n{self._tail()}")
            if time.monotonic() > deadline:
                raise StartFailed(f"`headrace up` runs for {_START_S:.0f} s, and not yet: {what}:\n{self._tail()}")
            time.sleep(_POLL_S)

    def _tail(self) -> str:
        return "\n".join(self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:])
