"""Records what alerts and traces tell of a fault run: a worker, the router and nats-server are killed under load.

    python docs/images/record_fault_signals.py

It needs Prometheus (`make monitors`) and the extra `otel`. A deployment of its own is started on this machine and ended. While
`headrace up` stands still, which would restart what was killed within seconds, a fault lasts long enough for the alerts.
"""

from __future__ import annotations

import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

import httpx  # noqa: E402
import record_faults  # noqa: E402
from record_faults import Load, pid_of  # noqa: E402

from tests.faults.test_dashboards import Prometheus  # noqa: E402
from tests.support.otlp_receiver import Received, otlp_receiver  # noqa: E402
from tests.support.up_process import RunningUp  # noqa: E402

LOOK_S = 1.0
STREAMS = 48


class Alerts:
    """The changes of alerts since a moment, as Prometheus tells them."""

    def __init__(self, prometheus: Prometheus, parts: dict[str, str]) -> None:
        """`parts`: instance of the scraper → name of the part."""
        self._url = f"{prometheus.url}/api/v1/alerts"
        self._parts = parts
        self._began = time.monotonic()
        self._known: dict[str, str] = {}

    def say(self, text: str) -> None:
        """Print a line with the time since the beginning."""
        sys.stdout.write(f"{time.monotonic() - self._began:4.0f} s  {text}\n")
        sys.stdout.flush()

    def watch(self, seconds: float) -> None:
        """Print every alert whose state changes."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            time.sleep(LOOK_S)
            told = httpx.get(self._url, timeout=10).json()["data"]["alerts"]
            now = {self._name(one): str(one["state"]) for one in told}
            for name in sorted(now.keys() | self._known.keys()):
                if now.get(name) != self._known.get(name):
                    self.say(f"        {name}: {now.get(name, 'over')}")
            self._known = now

    def _name(self, alert: dict[str, Any]) -> str:
        labels = alert["labels"]
        about = self._parts.get(labels.get("instance", "")) or labels.get("reason") or labels.get("role")
        return f"{labels['alertname']} ({about})" if about else str(labels["alertname"])


def parts_of(state: dict[str, Any]) -> dict[str, str]:
    """Return the names of parts by their addresses for a scraper."""
    found = {f"127.0.0.1:{state['frontend']['port']}": "the frontend"}
    for kind in ("worker", "router"):
        for number, part in enumerate(state[f"{kind}s"], 1):
            found[f"127.0.0.1:{part['metrics_port']}"] = f"{kind} {number}"
    return found


@contextmanager
def unrepaired(up: RunningUp) -> Iterator[None]:
    """Let `headrace up` stand still."""
    os.kill(up.process.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(up.process.pid, signal.SIGCONT)


def tree(spans: list[Received]) -> str:
    """Return a trace as lines: when, how long, what, where, and what it links to."""
    root = next(span for span in spans if span.name.startswith("chat"))
    names = {span.id: f"{span.name} {span.attributes.get('headrace.attempt', '')}".rstrip() for span in spans}
    lines = [f"trace {root.trace}"]
    for span in [root, *sorted((one for one in spans if one is not root), key=lambda one: one.begin_ns)]:
        inner = "" if span is root else "  "
        links = f"  links to {', '.join(names[link] for link in span.links)}" if span.links else ""
        begin, took = (span.begin_ns - root.begin_ns) / 1e6, (span.end_ns - span.begin_ns) / 1e6
        where = f"{span.service} {span.instance}"
        lines.append(f"{begin:7.0f} ms {took:7.0f} ms  {inner}{names[span.id]:<12} {where}{links}")
    return "\n".join(lines)


def record(folder: Path) -> None:
    """Run the deployment, kill its parts one after the other, and print what is told."""
    slow = ("--engine-arg", 'timing_overrides={"decode_base_s": 0.02}')
    with otlp_receiver() as receiver:
        traces = ("--trace-endpoint", receiver.url, "--trace-sample", "0")
        up = RunningUp(folder, "--workers", "3", "--routers", "1", "--no-access-log", *traces, *slow)
        try:
            up.until_ready()
            up.until("the router works", lambda: bool(up.events("router.ready")))
            prometheus = Prometheus(folder, up)
            try:
                up.until("Prometheus answers", lambda: prometheus.has_data("vector(1)"))
                record_faults.STREAMS = STREAMS
                load = Load(up.state()["url"])
                alerts = Alerts(prometheus, parts_of(up.state()))
                alerts.watch(30)
                with unrepaired(up):
                    alerts.say("a worker is killed and stays away")
                    os.kill(pid_of(up, "workers"), signal.SIGKILL)
                    alerts.watch(75)
                    alerts.say("another worker is killed")
                    os.kill(pid_of(up, "workers", 1), signal.SIGKILL)
                    alerts.watch(15)
                alerts.say("both may come back")
                alerts.watch(30)
                alerts.say("the router is killed, and comes back by itself")
                os.kill(pid_of(up, "routers"), signal.SIGKILL)
                alerts.watch(20)
                with unrepaired(up):
                    alerts.say("nats-server is killed and stays away")
                    os.kill(pid_of(up, "nats"), signal.SIGKILL)
                    alerts.watch(45)
                alerts.say("it may come back")
                alerts.watch(40)
                load.stop()
                sys.stdout.write(f"answers: {load.ended}\n{sorted({text[:200] for text in load.errors})}\n\n")
            finally:
                prometheus.process.kill()
                prometheus.process.wait()
            moved = next(span.trace for span in receiver.spans if span.links)
            sys.stdout.write(tree([span for span in receiver.spans if span.trace == moved]) + "\n")
        finally:
            up.stop()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as made:
        record(Path(made))
