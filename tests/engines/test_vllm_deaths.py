"""Real vLLM processes being killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from tests.engines.conftest import ROOT

pytestmark = [pytest.mark.engine, pytest.mark.fault, pytest.mark.timeout(240)]


class Victim:
    """A worker process with vLLM inside."""

    def __init__(self, model: Path, settings: dict[str, str], place: Path) -> None:
        """Its temporary files come to `place`."""
        self._place = place
        command = [sys.executable, "-m", "tests.engines.support.victim", str(model), json.dumps(settings)]
        self.process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            cwd=ROOT,
            env=os.environ | {"TMPDIR": str(place)},
        )

    def line(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def group(self) -> dict[int, str]:
        """The living processes of the worker's group, itself left out: id to name."""
        found = {}
        for entry in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                name, _, rest = (entry / "stat").read_text(errors="replace").rpartition(")")
                fields = rest.split()
                pid = int(entry.name)
                if int(fields[2]) == self.process.pid and fields[0] not in "ZX" and pid != self.process.pid:
                    found[pid] = name.partition("(")[2]
        return found

    def sockets(self) -> set[str]:
        """The folders in which it has made local sockets, as they begin."""
        found = (entry.relative_to(self._place).parts for entry in self._place.rglob("*") if entry.is_socket())
        return {parts[0].rpartition("-")[0] for parts in found}

    def wait_for_process(self, name: str) -> int:
        """The id of the engine process whose name (the kernel keeps 15 characters) contains `name`; waits for it."""
        until = time.monotonic() + 120
        while time.monotonic() < until:
            for pid, found in self.group().items():
                if name in found:
                    return pid
            time.sleep(0.05)
        raise AssertionError(f"no process named {name!r} came up; there are {self.group()}")

    def alone(self, within_s: float) -> bool:
        until = time.monotonic() + within_s
        while self.group() and time.monotonic() < until:
            time.sleep(0.02)
        return not self.group()


def tcp(pid: int) -> set[str]:
    """The inodes of a process's TCP sockets."""
    rows = (line.split() for name in ("tcp", "tcp6") for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:])
    known = {f"socket:[{row[9]}]" for row in rows}
    held = set()
    for entry in Path(f"/proc/{pid}/fd").iterdir():
        with suppress(FileNotFoundError):  # closed since the folder was listed
            held.add(str(entry.readlink()))
    return held & known


@pytest.fixture
def victim(request: pytest.FixtureRequest, model_dir: Path) -> Iterator[Victim]:
    with tempfile.TemporaryDirectory() as place:
        victim = Victim(model_dir, getattr(request, "param", {}), Path(place))
        assert victim.line() == "leader"
        yield victim
        victim.process.kill()
        victim.process.communicate()
        with suppress(ProcessLookupError):
            os.killpg(victim.process.pid, signal.SIGKILL)


@pytest.mark.parametrize("victim", [{"distributed_executor_backend": "mp"}], indirect=True)  # the most processes it may have
def test_a_worker_killed_while_its_engine_starts_leaves_nothing(victim: Victim) -> None:
    victim.wait_for_process("Worker")
    assert len(victim.group()) >= 2
    victim.process.kill()
    victim.process.wait()
    assert victim.alone(within_s=5)


def test_a_dead_engine_is_noticed_and_cleaned_up(victim: Victim) -> None:
    assert victim.line() == "started"
    core = victim.wait_for_process("EngineCor")
    assert not any("Worker" in name for name in victim.group().values())  # it computes by itself
    assert tcp(victim.process.pid)
    assert not tcp(victim.process.pid) & tcp(core), "it holds what the worker would close"
    assert victim.sockets() == {"headrace-vllm"}
    os.kill(core, signal.SIGKILL)
    killed = time.monotonic()
    assert victim.line().startswith("died ")
    assert time.monotonic() - killed < 10  # vLLM notices within a second or so; this is only not to wait for a silence watchdog
    assert victim.line() == "refused"
    assert victim.line() == "stopped []"  # nothing was reported as finished or failed: the death speaks for all
    assert victim.process.wait(30) == 0
    assert victim.alone(within_s=5)
    assert victim.sockets() == set()
