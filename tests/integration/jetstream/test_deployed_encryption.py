"""The files of `deploy/` at a real nats-server: it syncs all that it confirms, and stores nothing in plain text with
their two lines for encryption.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import time
from pathlib import Path

import nats
import pytest
import yaml

from headrace.doctor_facts import read_monitoring
from headrace.jetstream.embedded_server import find_binary

DEPLOY = Path(__file__).parents[3] / "deploy"
KEY = "k" + "0e5" * 21
SECRET = b"my PIN is 4711"
LINES = ("cipher: aes", "key: $HEADRACE_STORE_KEY")


def config_of(name: str) -> str:
    """Return a configuration as it is deployed, without its cluster; of the manifests that of their ConfigMap."""
    text = (DEPLOY / name).read_text()
    if name.endswith("-cluster.conf"):
        text = text.replace("include accounts.conf", "").replace("$HEADRACE_SERVER_NAME", "one")
        return re.sub(r"(?ms)^cluster \{.*?^\}", "", text)
    if not name.endswith(".yaml"):
        return text
    maps = [each for each in yaml.safe_load_all(text) if each["kind"] == "ConfigMap"]
    config: str = maps[0]["data"]["nats-server.conf"]
    return re.sub(r"(?ms)^cluster \{.*?^\}", "", config).replace("server_name: $SERVER_NAME", "server_name: one")


@pytest.mark.parametrize(
    "name", ["systemd/nats-server.conf", "systemd/nats-server-cluster.conf", "compose/nats-server.conf", "kubernetes/nats.yaml"]
)
@pytest.mark.parametrize("encrypted", [True, False])
async def test_all_is_synced_and_with_the_two_lines_nothing_is_in_plain_text(
    name: str, encrypted: bool, tmp_path: Path
) -> None:
    config = config_of(name)
    for line in LINES:
        assert config.count(f"#{line}\n") == 1
        config = config.replace(f"#{line}", line) if encrypted else config
    config = re.sub(r"(?m)^(port|http|host|listen|pid_file): .*$", "", config)
    config = re.sub(r"(?m)^( *store_dir): .*$", rf"\1: {json.dumps(str(tmp_path / 'store'))}", config)
    config += f'\nlisten: "127.0.0.1:-1"\nhttp: "127.0.0.1:-1"\nports_file_dir: {json.dumps(str(tmp_path))}\n'
    (tmp_path / "nats-server.conf").write_text(config)
    with (tmp_path / "log").open("wb") as log:
        command = [str(find_binary()), "--config", str(tmp_path / "nats-server.conf")]
        server = subprocess.Popen(command, stdout=log, stderr=log, env={**os.environ, "HEADRACE_STORE_KEY": KEY})
    try:
        ports = ports_of(server, tmp_path)
        assert read_monitoring(ports["monitoring"][0]).sync_interval_s == 0
        client = await nats.connect(ports["nats"][0])
        await client.jetstream().add_stream(name="S", subjects=["s"])
        await client.jetstream().publish("s", SECRET)
        await client.close()
    finally:
        server.terminate()
        server.wait()
    assert ("AES-GCM" in (tmp_path / "log").read_text()) == encrypted
    plain = [file for file in (tmp_path / "store").rglob("*") if file.is_file() and SECRET in file.read_bytes()]
    assert bool(plain) != encrypted


def ports_of(server: subprocess.Popen[bytes], folder: Path) -> dict[str, list[str]]:
    deadline = time.monotonic() + 20
    while True:
        try:
            return dict(json.loads((folder / f"nats-server_{server.pid}.ports").read_text()))
        except (OSError, ValueError):
            assert server.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline
            time.sleep(0.02)
