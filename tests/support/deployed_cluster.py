"""Three nats-servers on loopback with the configuration of a deployment, but for its addresses and its folder."""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import signal
import subprocess
import urllib.request
from pathlib import Path
from typing import Any, Self

from headrace.jetstream.embedded_server import find_binary
from headrace.up.frontend_probe import choose_port
from tests.support.nats_cluster import leader_of

START_S = 60.0
PASSWORD = "k1"


class DeployedCluster:
    """Enter it to run the servers. `config`: as it is deployed, with cluster, for all three. `accounts`: what it includes."""

    def __init__(self, folder: Path, config: str, accounts: str = "") -> None:
        self.folder = folder
        self.config = config
        self._accounts = accounts
        # of its own: while a server is down nobody else is given its ports there
        self.host = "127." + ".".join(str(random.randint(2, 254)) for _ in range(3))
        self._ports = [{kind: choose_port(self.host, 0) for kind in ("client", "route", "monitor")} for _ in range(3)]
        self.processes: list[subprocess.Popen[bytes] | None] = [None] * 3

    async def __aenter__(self) -> Self:
        for number in range(3):
            self.start(number)
        try:
            async with asyncio.timeout(START_S):
                while not await self.leader():
                    await asyncio.sleep(0.1)
        except BaseException:
            self.kill_all()
            raise
        return self

    async def __aexit__(self, *_raised: object) -> None:
        self.kill_all()

    def start(self, number: int) -> None:
        """Start a server with the present configuration."""
        folder = self._configured(number)
        name = f"headrace-nats-{number}"
        environment = {
            "PATH": os.environ["PATH"],
            "SERVER_NAME": name,
            "HEADRACE_SERVER_NAME": name,
            "HEADRACE_ROUTE_PASSWORD": PASSWORD,
            "HEADRACE_ROUTES": self._routes(f"route:{PASSWORD}@"),
        }
        with (folder / "log").open("ab") as log:
            command = [str(find_binary()), "--config", str(folder / "nats-server.conf")]
            self.processes[number] = subprocess.Popen(command, stdout=log, stderr=log, env=environment)

    def reload(self, number: int) -> None:
        """Have a server read the present configuration."""
        self._configured(number)
        process = self.processes[number]
        assert process is not None
        process.send_signal(signal.SIGHUP)

    def _configured(self, number: int) -> Path:
        folder = self.folder / f"server-{number}"
        folder.mkdir(exist_ok=True)
        (folder / "nats-server.conf").write_text(self._config_of(number, folder))
        (folder / "accounts.conf").write_text(self._accounts)
        return folder

    def kill(self, number: int) -> None:
        """Kill a server, if it runs."""
        process, self.processes[number] = self.processes[number], None
        if process is not None:
            process.kill()
            process.wait()

    def kill_all(self) -> None:
        for number in range(3):
            self.kill(number)

    def log(self, number: int) -> str:
        return (self.folder / f"server-{number}" / "log").read_text()

    @property
    def monitoring_urls(self) -> tuple[str, ...]:
        return tuple(f"http://{self.host}:{ports['monitor']}" for ports in self._ports)

    @property
    def urls(self) -> tuple[str, ...]:
        return tuple(f"nats://{self.host}:{ports['client']}" for ports in self._ports)

    async def leader(self, stream: str = "") -> str:
        """Return the name of the server that leads a stream, or all of JetStream; "" without one."""
        for process, url in zip(self.processes, self.monitoring_urls, strict=True):
            if process is not None:
                told = await asyncio.to_thread(_told, f"{url}/jsz?accounts=true&streams=true")
                if found := leader_of(told, stream):
                    return found
        return ""

    def _config_of(self, number: int, folder: Path) -> str:
        """Return the configuration with the addresses and the folder of this server. Fails where it has none to replace."""
        ports = self._ports[number]
        text = re.sub(r'(?m)^ *"?(port|http|http_port|host|listen|pid_file)"?: *[^,\n]+,?$', "", self.config)
        text, routes = re.subn(r'(?s)("?routes"?: *)\[.*?\]', lambda found: found[1] + self._routes(), text)
        text, stores = re.subn(r'("?store_dir"?: *)[^,\n]+', lambda found: found[1] + json.dumps(str(folder / "store")), text)
        route = json.dumps(f"{self.host}:{ports['route']}")
        text, clusters = re.subn(r'("?cluster"?:? *\{)', lambda found: f"{found[1]}\nlisten: {route}\n", text)
        assert (routes + text.count("routes: $HEADRACE_ROUTES"), stores, clusters) == (1, 1, 1), text
        client, monitor = (json.dumps(f"{self.host}:{ports[kind]}") for kind in ("client", "monitor"))
        return re.sub(r"^\s*(\{?)", rf"\1\nlisten: {client}\nhttp: {monitor}\n", text, count=1)

    def _routes(self, user: str = "") -> str:
        return json.dumps([f"nats-route://{user}{self.host}:{ports['route']}" for ports in self._ports])


def _told(url: str) -> dict[str, Any]:
    try:
        with urllib.request.urlopen(url, timeout=1.0) as answer:
            told: dict[str, Any] = json.load(answer)
    except (OSError, ValueError):
        return {}
    return told
