"""A `headrace up` as it is by default: its NATS server lets in who has the login of the deployment, and nobody else."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.client import ClientOptions, connect
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import AccessDenied
from headrace.jetstream.logins.nkey_logins import new_seed
from headrace.jetstream.subjects import Subjects
from tests.support.up_logins import folder_of, headrace
from tests.support.up_process import RunningUp, routed_up

pytestmark = pytest.mark.deployment

TIMEOUT_S = 60.0
BODY = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    with routed_up(tmp_path_factory.mktemp("one"), "--log-format", "json") as running:
        yield running


def logins_of(up: RunningUp) -> Path:
    return folder_of(up) / ".headrace" / "nats" / "logins"


def url_of(up: RunningUp) -> str:
    return str(up.state()["nats"]["url"])


def words_to_the_server(up: RunningUp, *lines: str) -> str:
    """All that nats-server says to a client in plain words, until it closes the connection or has said PONG."""
    host, port = url_of(up).removeprefix("nats://").split(":")
    said = b""
    with socket.create_connection((host, int(port)), timeout=TIMEOUT_S) as plain:
        plain.sendall("".join(f"{line}\r\n" for line in (*lines, "PING")).encode())
        while b"PONG" not in said and (more := plain.recv(65536)):
            said += more
    return said.decode()


def test_another_process_of_the_machine_hears_and_stores_nothing(up: RunningUp) -> None:
    said = words_to_the_server(up, 'CONNECT {"verbose": false}', "SUB > 1", "PUB hr.job.sim._ 2", "{}")
    assert "Authorization Violation" in said
    assert "PONG" not in said
    assert not [line for line in said.splitlines() if line.startswith("MSG")]


async def test_neither_no_login_nor_another_ones_is_let_in_and_the_error_says_where_it_lies(
    up: RunningUp, tmp_path: Path
) -> None:
    with pytest.raises(AccessDenied, match=r"asks for a login .*<data-dir>/nats/logins"):
        await Connection.connect(ConnectOptions(servers=(url_of(up),)), subjects=Subjects())
    other = tmp_path / "other.nk"
    other.write_text(new_seed())
    for strange in (ConnectOptions(nkey_seed=str(other)), ConnectOptions(user="headrace", password="headrace")):
        options = ConnectOptions(
            servers=(url_of(up),), nkey_seed=strange.nkey_seed, user=strange.user, password=strange.password
        )
        with pytest.raises(AccessDenied, match="refused the credentials"):
            await Connection.connect(options, subjects=Subjects())


def test_the_login_is_the_users_alone(up: RunningUp) -> None:
    folder = logins_of(up)
    assert {path.name for path in folder.iterdir()} == {"deployment.nk", "deployment.json"}
    assert {path.stat().st_mode & 0o777 for path in folder.iterdir()} == {0o600}
    assert folder.stat().st_mode & 0o777 == 0o700


def test_no_argument_no_environment_no_log_and_no_shown_setting_has_the_seed(up: RunningUp) -> None:
    seed = (logins_of(up) / "deployment.nk").read_text().strip()
    assert seed.startswith("SU")
    for pid in up.pids():
        for name in ("cmdline", "environ"):
            assert seed.encode() not in Path(f"/proc/{pid}/{name}").read_bytes(), (pid, name)
    shown = [headrace(up, "config"), up.log_file.read_text(), up.out_file.read_text(), up.run_file.read_text()]
    shown += [path.read_text() for path in logins_of(up).parent.glob("nats-server.*")]
    assert len(shown) > 4, "the server's log and configuration are among them"
    assert not [text for text in shown if seed in text]


def test_parts_and_commands_find_it_by_the_data_folder(up: RunningUp) -> None:
    assert up.chat()
    assert "worker-1-" in headrace(up, "worker", "status")
    assert "HR_JOB" in headrace(up, "streams", "status", "--nats", url_of(up))
    assert "worker-1-" in headrace(up, "top", "--once")
    assert headrace(up, "doctor")


def test_a_command_of_another_folder_is_refused_until_it_is_told_the_data_folder(up: RunningUp, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-P", "-m", "headrace", "worker", "status", "--nats", url_of(up)]

    def done(**more: str) -> subprocess.CompletedProcess[str]:
        env = {**environment, **more}
        return subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)

    refused = done()
    assert refused.returncode != 0
    assert "asks for a login" in refused.stderr
    assert done(**up.environment()).returncode == 0


def test_a_worker_that_is_started_by_hand_joins_with_it(up: RunningUp, tmp_path: Path) -> None:
    command = [sys.executable, "-P", "-m", "headrace", "worker", "--engine", "sim", "--name", "byhand", "--nats", url_of(up)]
    with (tmp_path / "log").open("wb") as log:
        worker = subprocess.Popen(command, cwd=folder_of(up), stdout=log, stderr=log)
    try:
        up.until("it has joined", lambda: "byhand-" in headrace(up, "worker", "status"))
    finally:
        worker.terminate()
        assert worker.wait(TIMEOUT_S) == 0


async def test_the_client_finds_it_with_the_address_and_without(up: RunningUp) -> None:
    for url in (None, url_of(up)):
        async with connect(url, ClientOptions(data_dir=folder_of(up) / ".headrace")) as client:
            job = await client.submit(BODY, priority="std")
            assert (await job.result(timeout_s=TIMEOUT_S)).text
    with pytest.raises(AccessDenied):
        async with connect(url_of(up), ClientOptions(data_dir=folder_of(up) / "none")):
            pass


def test_the_server_knows_it_again_when_it_was_killed(up: RunningUp) -> None:
    before = up.state()["nats"]["pid"]
    os.kill(before, signal.SIGKILL)
    up.until("another server", lambda: up.state()["nats"]["pid"] not in (None, before))
    up.until("an answer", up.answers)
    assert "Authorization Violation" in words_to_the_server(up, 'CONNECT {"verbose": false}')


def test_it_stays_the_same_over_starts_and_a_second_up_leaves_it_alone(tmp_path: Path) -> None:
    seeds = []
    for _ in range(2):
        with routed_up(tmp_path) as up:
            seeds.append((logins_of(up) / "deployment.nk").read_text())
            context = json.loads((logins_of(up) / "deployment.json").read_text())
            assert context["url"] == url_of(up)
            second = [sys.executable, "-P", "-m", "headrace", "up", "--engine", "sim", "--port", "0", "--no-console"]
            refused = subprocess.run(second, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
            assert "another `headrace up` uses the data folder" in refused.stderr
            assert json.loads((logins_of(up) / "deployment.json").read_text()) == context
            assert up.chat()
            up.process.send_signal(signal.SIGINT)
            assert up.process.wait(TIMEOUT_S) == 0
    assert seeds[0] == seeds[1]
