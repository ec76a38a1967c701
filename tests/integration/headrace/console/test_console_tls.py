"""The console over HTTPS: its link says so, its key does not travel in the clear, and plain HTTP gets nothing."""

from __future__ import annotations

import re
import ssl
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.certificates import write_certificate

COMMAND = [sys.executable, "-P", "-m", "headrace", "console", "--console-port", "0"]


def test_a_console_with_a_certificate_speaks_https_only(
    nats_server: EmbeddedServer, subjects: Subjects, tmp_path: Path
) -> None:
    cert, key = write_certificate(tmp_path)
    where = ["--nats", nats_server.url, "--prefix", subjects.prefix]
    tls = ["--console-tls-cert", str(cert), "--console-tls-key", str(key)]
    with (tmp_path / "console.log").open("wb") as log:
        console = subprocess.Popen([*COMMAND, *where, *tls], cwd=tmp_path, stdout=subprocess.PIPE, stderr=log, text=True)
    try:
        assert console.stdout is not None
        found = re.search(r"https://[^/:]+:(\d+)/console#key=\S+", console.stdout.readline())
        assert found is not None, (tmp_path / "console.log").read_text()
        with httpx.Client(verify=ssl.create_default_context(cafile=str(cert))) as client:
            assert client.get(f"https://localhost:{found[1]}/console").status_code in (200, 503)  # 503: until NATS is there
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://localhost:{found[1]}/console")
    finally:
        console.terminate()
        console.communicate(timeout=30)


def test_a_key_without_a_certificate_is_refused(nats_server: EmbeddedServer, tmp_path: Path) -> None:
    done = subprocess.run(
        [*COMMAND, "--nats", nats_server.url, "--console-tls-key", str(tmp_path / "key.pem")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode != 0
    assert "console.tls_key" in done.stderr
