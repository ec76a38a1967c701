"""A `headrace up` on this machine for the length of a benchmark, and routers that come and go beside it.

Routers apart from `up` let one deployment be measured under one policy after the other: the same processes, in the same minute.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from prometheus_client.parser import text_string_to_metric_families

from headrace.workers.process_guard import set_parent_death_signal

_HEADRACE = str(Path(sys.executable).with_name("headrace"))
_POLL_S = 0.1
_STOP_S = 30.0


class NotStarted(SystemExit):
    """A part did not get ready; the end of its log is in the message."""


class _Part:
    """A `headrace` command whose output goes to a file. It ends with this process, however that ends (on Linux)."""

    def __init__(self, command: list[str], log: Path, env: dict[str, str] | None = None) -> None:
        self.log = log
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                [_HEADRACE, *command],
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=partial(set_parent_death_signal, signal.SIGTERM, parent=os.getpid()),  # noqa: PLW1509 -- one thread
                env={**os.environ, **(env or {})},
            )

    @property
    def pid(self) -> int:
        return self.process.pid

    def until(self, ready: Any, timeout_s: float) -> None:
        """Raises NotStarted."""
        end = time.monotonic() + timeout_s
        while time.monotonic() < end and self.process.poll() is None:
            try:
                if ready():
                    return
            except (OSError, KeyError, ValueError):
                pass
            time.sleep(_POLL_S)
        self.stop()
        raise NotStarted(f"not ready: {' '.join(map(str, self.process.args))}\n{self.log.read_text()[-3000:]}")  # type: ignore[arg-type]

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


class Deployment:
    """All its workers can answer from the start of the `with` block on; `model` is their name."""

    def __init__(
        self,
        data_dir: Path,
        port: int,
        workers: int,
        *,
        engine: str = "sim",
        routers: int = 0,
        arguments: Sequence[str] = (),
        timeout_s: float = 60.0,
        aggregated: bool = True,
        log_level: str = "warning",
        environment: Mapping[str, str] | None = None,
    ) -> None:
        """`environment` is added to that of this process.

        `arguments` say what runs if it is not so many `aggregated` workers; `workers` then counts those that answer.
        """
        self.data_dir, self.port, self.model = data_dir, port, ""
        self._workers, self._timeout_s = workers, timeout_s
        self._environment = dict(environment or {})
        self._command = ["up", "--no-console", "--engine", engine, "--routers", str(routers), "--port", str(port)]
        self._command += ["--workers", str(workers)] if aggregated else []
        self._command += ["--data-dir", str(data_dir), "--log-level", log_level, *arguments]

    def __enter__(self) -> Self:
        self._part = _Part(self._command, self.data_dir / "up.log", self._environment)
        self._part.until(self._ready, self._timeout_s)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._part.stop()

    @property
    def pid(self) -> int:
        return self._part.pid

    def _ready(self) -> bool:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/health", timeout=1) as answer:
            models = json.load(answer)["models"]
        self.model = next(iter(models), "")
        return bool(models) and models[self.model]["workers"] >= self._workers

    @property
    def log(self) -> str:
        return self._part.log.read_text()

    def until(self, event: str) -> None:
        """Wait for an event in the log. Raises NotStarted."""
        self._part.until(lambda: f'"{event}"' in self.log, self._timeout_s)

    def nats_url(self) -> str:
        return str(json.loads((self.data_dir / "run" / "up.json").read_text())["nats"]["url"])


class Router:
    """A router for a deployment; knows all of its workers and their caches from the start of the `with` block on."""

    def __init__(
        self, deployment: Deployment, policy: str, *, workers: int, metrics_port: int, arguments: Sequence[str] = ()
    ) -> None:
        self._deployment, self._policy, self._workers, self._port = deployment, policy, workers, metrics_port
        self._arguments = arguments

    def __enter__(self) -> Self:
        command = ["router", "--nats", self._deployment.nats_url(), "--policy", self._policy, "--log-level", "warning"]
        command += ["--data-dir", str(self._deployment.data_dir)]  # where its login is
        command += ["--router-metrics-port", str(self._port), *self._arguments]
        self._part = _Part(command, self._deployment.data_dir / "router.log")
        self._part.until(self._ready, 30.0)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._part.stop()

    @property
    def pid(self) -> int:
        return self._part.pid

    @property
    def log(self) -> str:
        return self._part.log.read_text()

    def _ready(self) -> bool:
        found = self.metrics()
        workers = sum(value for name, value in found.items() if name.startswith("headrace_router_workers{"))
        ready = [value for name, value in found.items() if name.startswith("headrace_router_index_ready{")]
        return workers >= self._workers and bool(ready) and all(ready)

    def metrics(self) -> dict[str, float]:
        """Return the metrics of now, by name and labels."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=5) as answer:
            text = answer.read().decode()
        return {
            sample.name + "{" + ",".join(f"{k}={v}" for k, v in sorted(sample.labels.items())) + "}": sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name.startswith("headrace_router")
        }
