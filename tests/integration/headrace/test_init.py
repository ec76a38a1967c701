"""`headrace init` and `headrace steward`: a deployment on a nats-server that others run, from the files that were printed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from headrace.jetstream.embedded_server import EmbeddedServer, find_binary
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import pool_id

pytestmark = pytest.mark.deployment

TIMEOUT_S = 40.0
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
PORT = 18000 + os.getpid() % 1000
COMMAND = [sys.executable, "-P", "-m", "headrace"]


def init(folder: Path, *words: str) -> str:
    done = subprocess.run(
        [*COMMAND, "init", "--out", str(folder), *words],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@contextmanager
def running(folder: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{words[0]}.log").open("wb") as log:
        process = subprocess.Popen([*COMMAND, *words], cwd=folder, env=ENVIRONMENT, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait(20)


def test_a_server_restarts_for_its_first_accounts_and_reloads_for_more(tmp_path: Path) -> None:
    """nats-server gives accounts that come by a reload no JetStream, and users of those that it has what they need."""
    logins, config = tmp_path / "logins", tmp_path / "nats-server.conf"
    told = init(logins, "--nats", f"nats://127.0.0.1:{PORT}")
    assert "restart it" in told
    plain = f'listen: "127.0.0.1:{PORT}"\njetstream {{ store_dir: "{tmp_path / "store"}", max_memory_store: 1GB }}\n'
    config.write_text(plain)
    steward = [*COMMAND, "steward", "--nats-context", str(logins / "operator.json")]
    with nats_server(config) as server:
        config.write_text(f"{plain}include logins/accounts.conf\n")
        server.send_signal(signal.SIGHUP)
        until_said(config.with_suffix(".log"), "Reloaded server configuration", server)
        done = subprocess.run(steward, env=ENVIRONMENT, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert "has no JetStream" in done.stderr
    with nats_server(config) as server, running(logins, *steward[len(COMMAND) :]) as process:
        until_said(logins / "steward.log", "the steward answers", process)
        init(logins, "--model", "sim", "--nats", f"nats://127.0.0.1:{PORT}")
        server.send_signal(signal.SIGHUP)
        until_said(config.with_suffix(".log"), "Reloaded server configuration", server)
        context = logins / f"worker-{pool_id('sim')}.json"
        with running(logins, "worker", "--engine", "sim", "--model", "sim", "--nats-context", str(context)) as worker:
            until_said(logins / "worker.log", "worker.ready", worker)


@contextmanager
def nats_server(config: Path) -> Iterator[subprocess.Popen[bytes]]:
    with config.with_suffix(".log").open("wb") as log:
        server = subprocess.Popen([str(find_binary()), "--config", str(config)], stdout=log, stderr=log)
    try:
        until_said(config.with_suffix(".log"), "Server is ready", server)
        yield server
    finally:
        server.terminate()
        server.wait(20)


def until_said(log: Path, text: str, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + TIMEOUT_S
    while text not in log.read_text():
        assert process.poll() is None, log.read_text()
        assert time.monotonic() < deadline, log.read_text()
        time.sleep(0.05)


@pytest.mark.parametrize(
    ("form", "of_worker"),
    [((), ("--worker", "gpu7")), (("--jwt",), ("--worker", "gpu7")), ((), ())],
    ids=["accounts", "tokens", "login-of-the-pool"],
)
def test_the_printed_accounts_and_contexts_make_a_deployment(
    tmp_path: Path, form: tuple[str, ...], of_worker: tuple[str, ...]
) -> None:
    logins = tmp_path / "logins"
    told = init(logins, "--model", "sim", "--tenant", "acme", *form, *(() if form else of_worker))
    assert "headrace steward --nats-context" in told
    assert "encrypts what it stores only if it is told to" in told
    config = (logins / "accounts.conf").read_text()
    with EmbeddedServer(tmp_path / "nats", ServerSettings(extra=config)) as server:
        # The same seeds, and the address. The server that reads tokens need not be told of one more worker.
        init(logins, "--model", "sim", "--tenant", "acme", "--nats", server.url, *of_worker, *form)
        assert form or (logins / "accounts.conf").read_text() == config  # tokens have the time of their making
        worker = f"worker-{pool_id('sim')}{'.gpu7' if of_worker else ''}.json"
        parts = [
            ("worker", "--engine", "sim", "--nats-context", str(logins / worker)),
            ("router", "--nats-context", str(logins / "router.json")),
            ("frontend", "--port", str(PORT), "--nats-context", str(logins / "ingress.json")),
            ("steward", "--nats-context", str(logins / "operator.json")),  # later than those that need it
        ]
        with (
            running(tmp_path, *parts[0]),
            running(tmp_path, *parts[1]),
            running(tmp_path, *parts[2]),
            running(tmp_path, *parts[3]),
        ):
            body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            request = urllib.request.Request(
                f"http://127.0.0.1:{PORT}/v1/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
            )
            deadline = time.monotonic() + TIMEOUT_S
            while True:
                try:
                    with urllib.request.urlopen(request, timeout=20) as answer:
                        assert json.load(answer)["choices"][0]["message"]["content"]
                    break
                except OSError:
                    logs = "".join(path.read_text()[-1500:] for path in tmp_path.glob("*.log"))
                    assert time.monotonic() < deadline, logs
                    time.sleep(0.2)
            if of_worker:
                again = subprocess.run(
                    [*COMMAND, *parts[0]],
                    cwd=tmp_path,
                    env=ENVIRONMENT,
                    capture_output=True,
                    text=True,
                    timeout=60,
                    check=False,
                )
                assert again.returncode
                assert "registered as worker gpu7" in again.stderr + again.stdout
        refused = [line for line in server.log_file.read_text().splitlines() if "Violation" in line]
        assert not refused  # not even of parts that came before the steward: they wait for it


def test_a_worker_of_several_models_is_refused(tmp_path: Path) -> None:
    command = [*COMMAND, "init", "--out", str(tmp_path), "--model", "a", "--model", "b", "--worker", "gpu7"]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode
    assert "--worker gpu7: of which model?" in done.stderr


def test_files_of_logins_are_private_and_a_further_tenant_is_added(tmp_path: Path) -> None:
    logins = tmp_path / "logins"
    init(logins, "--tenant", "acme")
    before = (logins / "batch-acme.nk").read_text()
    assert "batch-rival" in init(logins, "--tenant", "acme", "--tenant", "rival")
    assert (logins / "batch-acme.nk").read_text() == before
    for path in (logins, *logins.iterdir()):
        assert not path.stat().st_mode & 0o077, path
