"""The systemd units are valid, hardened, and give each part the time that its drain takes."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

from headrace.base.errors import EXIT_CONFIGURATION
from headrace.jetstream.embedded_server import find_binary
from tests.support.command_lines import drain_s, is_known, read

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "deploy" / "systemd"
UNITS = sorted(FOLDER.glob("*.service"))
PROGRAMS = "/opt/headrace/bin"
MOST_EXPOSED = 2.0  # of 10, by `systemd-analyze security`
ANALYZE = shutil.which("systemd-analyze")
analyzed = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is not here: Debian's package systemd has it")


def values(unit: Path, key: str) -> list[str]:
    return re.findall(rf"(?m)^{key}=(.*)$", unit.read_text())


@pytest.fixture
def installed(tmp_path: Path) -> list[Path]:
    """The units as installed, with programs that exist."""
    programs = tmp_path / "bin"
    programs.mkdir()
    for name in ("headrace", "nats-server"):
        (programs / name).write_text("#!/bin/sh\n")
        (programs / name).chmod(0o755)
    for unit in UNITS:
        (tmp_path / unit.name).write_text(unit.read_text().replace(PROGRAMS, str(programs)))
    return [tmp_path / unit.name for unit in UNITS]


def verify(units: list[Path]) -> str:
    done = subprocess.run([str(ANALYZE), "verify", "--man=no", *map(str, units)], capture_output=True, text=True, check=False)
    return done.stderr


@analyzed
def test_systemd_takes_every_unit_without_a_word(installed: list[Path]) -> None:
    assert verify(installed) == ""


@analyzed
def test_a_key_that_systemd_does_not_know_is_told(installed: list[Path]) -> None:
    installed[0].write_text(installed[0].read_text().replace("NoNewPrivileges=", "NoMorePrivileges="))
    assert "NoMorePrivileges" in verify(installed)


@analyzed
@pytest.mark.parametrize("number", range(len(UNITS)), ids=[unit.stem for unit in UNITS])
def test_a_unit_is_hardened(number: int, installed: list[Path]) -> None:
    done = subprocess.run(
        [
            str(ANALYZE),
            "security",
            "--offline=true",
            f"--threshold={int(MOST_EXPOSED * 10)}",
            "--no-pager",
            str(installed[number]),
        ],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout.splitlines()[-1]


def test_there_is_a_unit_for_each_part() -> None:
    parts = {"nats", "frontend", "router", "worker@", "planner", "console", "steward"}
    assert {unit.stem for unit in UNITS} == {f"headrace-{part}" for part in parts}


def test_nats_server_takes_the_configuration_of_a_cluster_and_none_without_its_passwords(tmp_path: Path) -> None:
    text = (FOLDER / "nats-server-cluster.conf").read_text()
    (tmp_path / "nats-server.conf").write_text(text)
    (tmp_path / "accounts.conf").write_text("")
    own = {"HEADRACE_SERVER_NAME": "a", "HEADRACE_ROUTE_PASSWORD": "k1", "HEADRACE_ROUTES": '["nats-route://route:k1@a:6222"]'}
    command = [str(find_binary()), "-t", "-c", str(tmp_path / "nats-server.conf")]
    for left_out in (None, *own):
        environment = {name: value for name, value in own.items() if name != left_out}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode == 0) == (left_out is None), done.stderr
    (tmp_path / "accounts.conf").unlink()
    assert subprocess.run(command, env=own, capture_output=True, check=False).returncode != 0, "open to all without logins"
    assert {"write_deadline: 1s", "  sync_interval: always"} <= set(text.splitlines())
    assert re.search(r"max_memory_store: [1-9]", text)


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_a_unit_starts_what_there_is_and_waits_for_its_drain(unit: Path) -> None:
    (start,), (most,) = values(unit, "ExecStart"), values(unit, "TimeoutStopSec")
    words = shlex.split(start.replace("%i", "gpu0"))
    if words[0] == f"{PROGRAMS}/nats-server":
        return
    assert words[0] == f"{PROGRAMS}/headrace"
    if not is_known(words[1]):
        pytest.skip(f"this version has no command {words[1]}")
    given = [pair.partition("=") for line in values(unit, "Environment") for pair in shlex.split(line)]
    environ = {name: value.replace("%i", "gpu0") for name, _, value in given}
    assert environ["HEADRACE_CONFIG"] == "/etc/headrace/headrace.toml"
    settings = read(words[1:], {**environ, "HEADRACE_CONFIG": str(FOLDER / "headrace.toml")})
    assert float(most) >= drain_s(settings, words[1]) + 5
    assert str(EXIT_CONFIGURATION) in values(unit, "RestartPreventExitStatus")[0].split()
