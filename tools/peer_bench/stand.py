"""Headrace and its peers while they run: installed if need be, started with what they stand before, and ended together."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import uvloop

from headrace.base.errors import CommandError
from headrace.chat.streamed_answer import NoAnswer, served_models
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ConnectError
from headrace.tools.peer_bench.environment import NotInstalled, install, python_of
from headrace.tools.peer_bench.mock_back_end import MODEL
from headrace.tools.peer_bench.peers import HEADRACE, Peer, Places, headrace_command, mock_command
from headrace.tools.peer_bench.process_tree import running, wait_until
from headrace.tools.serve_bench.load import Target, bodies, run_closed

START_S = 90.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: its port, its processes, and those of its back end."""

    port: int
    roots: tuple[int, ...]
    back_end: tuple[int, ...] = ()


def free_port() -> int:
    """Return a port on which nothing listens now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Stand:
    """Servers that are up at once. Each start adds to `stack`, which ends them all."""

    def __init__(self, stack: ExitStack, folder: Path, environments: Path, model: Path | None) -> None:
        self._stack, self._folder, self._environments, self._model = stack, folder, environments, model
        self.servers: dict[str, Server] = {}

    def start_headrace(self, routers: int) -> None:
        """Start Headrace. Raises NotInstalled."""
        folder, port = self._made(HEADRACE), free_port()
        pid = self._run(HEADRACE, headrace_command(port, folder, routers), folder)
        self._until_served(HEADRACE, Server(port, (pid,)))

    def start(self, peer: Peer) -> None:
        """Install a peer if need be, and start it with what it stands before. Raises NotInstalled."""
        if peer.wants_model and self._model is None:
            raise NotInstalled("needs --model, a folder with a tokenizer and a chat template")
        environment = (self._environments / peer.name).absolute()
        install(peer, environment)
        folder, back_end_port = self._made(peer.name), free_port()
        back_end: tuple[int, ...] = ()
        mine: list[int] = []
        if peer.stands_before:
            back_end = (self._run(f"{peer.name}-mock", mock_command(back_end_port), folder),)
            if not wait_until(lambda: _serves(back_end_port), START_S, back_end):
                raise NotInstalled("the mock back end did not start")
        if peer.wants_nats:
            mine.append(self._nats(folder, back_end_port))
        places = Places(folder, python_of(environment), free_port(), back_end_port, free_port(), self._model)
        launch = peer.launch(places)
        for name, text in launch.files.items():
            (folder / name).write_text(text)
        try:
            mine += [
                self._stack.enter_context(running(command, folder / f"{number}.log", launch.environment, folder))
                for number, command in enumerate(launch.commands)
            ]
        except OSError as error:
            raise NotInstalled(f"did not start: {error}") from error
        self._until_served(peer.name, Server(places.port, tuple(mine), back_end))

    def _made(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        return folder

    def _nats(self, folder: Path, port: int) -> int:
        server = EmbeddedServer(folder / "nats", port=port)
        try:
            server.start()
        except ConnectError as error:
            raise NotInstalled(f"its nats-server did not start: {error}") from error
        self._stack.callback(server.stop)
        return server.pid or 0

    def _run(self, name: str, command: Sequence[str], folder: Path) -> int:
        return self._stack.enter_context(running(command, self._folder / f"{name}.log", {}, folder))

    def _until_served(self, name: str, server: Server) -> None:
        """Keep a server once it has answered a chat. Raises NotInstalled with the end of its log."""
        if not wait_until(lambda: _serves(server.port), START_S, server.roots):
            logs = [self._folder / f"{name}.log", *sorted((self._folder / name).glob("*.log"))]
            ends = [log.read_text(errors="replace")[-600:] for log in logs if log.exists()]
            raise NotInstalled(f"did not serve within {START_S:g} s: {' | '.join(ends)}")
        self.servers[name] = server


def _serves(port: int) -> bool:
    try:
        if not served_models(f"http://127.0.0.1:{port}"):
            return False
        return uvloop.run(run_closed(Target("127.0.0.1", port, MODEL), _few(), streams=1, timeout_s=10.0)).failed == 0
    except (NoAnswer, CommandError):
        return False


def _few() -> list[bytes]:
    return bodies(MODEL, requests=1, words=4, tokens=2, seed=-1)
