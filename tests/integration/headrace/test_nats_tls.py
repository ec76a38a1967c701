"""A `headrace up` whose NATS server takes TLS only, from clients with a certificate: mutual TLS beside the logins."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import ConnectError
from headrace.jetstream.subjects import Subjects
from tests.support.certificates import write_certificate
from tests.support.up_process import RunningUp, routed_up

pytestmark = pytest.mark.deployment


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A certificate for the server, one for its clients, and a stranger's. Each is its own authority."""
    found = {}
    for name in ("server", "client", "stranger"):
        folder = tmp_path_factory.mktemp(name)
        found[f"{name}_cert"], found[f"{name}_key"] = write_certificate(folder, name=name)
    return found


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Iterator[RunningUp]:
    flags = {
        "--nats-server-cert": files["server_cert"],
        "--nats-server-key": files["server_key"],
        "--nats-client-ca": files["client_cert"],
        "--nats-tls-ca": files["server_cert"],
        "--nats-tls-cert": files["client_cert"],
        "--nats-tls-key": files["client_key"],
    }
    words = [word for flag, path in flags.items() for word in (flag, str(path))]
    with routed_up(tmp_path_factory.mktemp("up"), "--nats-login", "roles", *words) as running:
        yield running


def test_a_deployment_serves_over_mutual_tls(up: RunningUp) -> None:
    assert up.chat()
    assert up.state()["nats"]["url"].startswith("tls://")


def test_commands_find_certificates_in_the_operators_context(up: RunningUp) -> None:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-P", "-m", "headrace", "worker", "status"]
    folder = up.run_file.parents[2]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 0, done.stderr
    assert "worker-1-" in done.stdout


@pytest.mark.parametrize(
    ("ca", "cert"),
    [("", ""), ("server", ""), ("server", "stranger"), ("stranger", "client")],
    ids=["plain", "without-a-certificate", "with-a-strangers", "of-another-server"],
)
async def test_a_client_is_refused(up: RunningUp, files: dict[str, Path], ca: str, cert: str) -> None:
    folder = up.run_file.parents[1] / "nats" / "logins"
    login = ConnectOptions.from_context(str(folder / "operator.json"))
    options = ConnectOptions(
        servers=(up.state()["nats"]["url"].replace("tls://", "tls://" if ca else "nats://"),),
        nkey_seed=login.nkey_seed,
        inbox_prefix=login.inbox_prefix,
        js_prefix=login.js_prefix,
        tls_ca=str(files[f"{ca}_cert"]) if ca else None,
        tls_cert=str(files[f"{cert}_cert"]) if cert else None,
        tls_key=str(files[f"{cert}_key"]) if cert else None,
    )
    with pytest.raises(ConnectError):
        await Connection.connect(options, subjects=Subjects())


def test_a_renewed_certificate_is_used_while_the_deployment_serves(up: RunningUp, files: dict[str, Path]) -> None:
    pid = up.state()["nats"]["pid"]
    log = up.run_file.parents[1] / "nats" / "nats-server.log"
    before = log.read_text().count("Reloaded: tls")  # it reads its configuration also when a worker is started
    write_certificate(files["server_cert"].parent, name="renewed")
    up.until("a reload", lambda: log.read_text().count("Reloaded: tls") > before)
    test_commands_find_certificates_in_the_operators_context(up)  # with the new certificate as the server's authority
    assert up.chat()
    assert up.state()["nats"]["pid"] == pid
