"""An OpenAI server without a model, for gateways to stand before: it streams as many tokens as are asked for, all at once.

    python -m headrace.tools.bench.stand PORT

It answers any GET with its one model, and a POST with a streamed chat, cheaply enough to be no bottleneck.
"""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from headrace.base.errors import CommandError
from headrace.chat import NoAnswer, served_models
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import ConnectError
from headrace.tools.bench.load import Target, bodies, run_closed
from headrace.tools.bench.serve import usage

MODEL = "sim"
TOKEN = "word "  # noqa: S105  # of an answer, no secret
_LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)", re.IGNORECASE)
_TOKENS = re.compile(rb'"max_(?:completion_)?tokens": ?(\d+)')
_STREAM = re.compile(rb'"stream": ?true')
_USAGE = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}


def _event(delta: dict[str, str], finish: str | None = None) -> bytes:
    told = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL}
    choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
    return b"data: %b\n\n" % json.dumps({**told, "choices": [choice]}, separators=(",", ":")).encode()


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


def _whole(told: object, status: str = "200 OK") -> bytes:
    body = json.dumps(told).encode()
    return b"HTTP/1.1 %b\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%b" % (status.encode(), len(body), body)


_HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nTransfer-Encoding: chunked\r\n\r\n"
_FIRST = _chunk(_event({"role": "assistant", "content": ""}))
_ONE = _chunk(_event({"content": TOKEN}))
_LAST = _chunk(_event({}, "length")) + _chunk(b"data: [DONE]\n\n") + b"0\r\n\r\n"
MODELS = _whole({"object": "list", "data": [{"id": MODEL, "object": "model", "created": 1, "owned_by": "mock"}]})


def answer(body: bytes) -> bytes:
    """Return the answer to a chat, each token an event and a chunk of its own."""
    found = _TOKENS.search(body)
    tokens = int(found.group(1)) if found is not None else 16
    if _STREAM.search(body):
        return _HEAD + _FIRST + _ONE * tokens + _LAST
    message = {"role": "assistant", "content": TOKEN * tokens}
    choice = {"index": 0, "message": message, "finish_reason": "length"}
    told = {"id": "chatcmpl-1", "object": "chat.completion", "created": 1, "model": MODEL, "choices": [choice]}
    return _whole({**told, "usage": _USAGE})


class MockConnection(asyncio.Protocol):
    """A connection of a client, which may keep it for many requests."""

    def __init__(self) -> None:
        self._buffer = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport: asyncio.Transport = transport  # type: ignore[assignment]

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        while (end := self._buffer.find(b"\r\n\r\n")) >= 0:
            length = _LENGTH.search(self._buffer, 0, end + 2)
            size = int(length.group(1)) if length is not None else 0
            if len(self._buffer) < end + 4 + size:
                return
            body = self._buffer[end + 4 : end + 4 + size]
            self._transport.write(answer(body) if self._buffer.startswith(b"POST") else MODELS)
            self._buffer = self._buffer[end + 4 + size :]


async def serve(port: int) -> asyncio.Server:
    return await asyncio.get_running_loop().create_server(MockConnection, "127.0.0.1", port)


async def _forever(port: int) -> None:
    async with await serve(port) as server:
        await server.serve_forever()


if __name__ == "__main__":
    uvloop.run(_forever(int(sys.argv[1])))


HEADRACE = "headrace"
TORCH = ("torch==2.13.0+cpu", "torch")  # the first that can be had


@dataclass(frozen=True, slots=True)
class Places:
    """The places of a peer: its folder, the ports it may take, and a model's folder with a tokenizer and a chat template."""

    folder: Path
    python: Path
    port: int
    back_end_port: int
    metrics_port: int
    model: Path | None = None

    @property
    def programs(self) -> Path:
        """Return the folder of its environment's programs."""
        return self.python.parent


@dataclass(frozen=True, slots=True)
class Launch:
    """Processes of a peer, in the order of their start. `files` are written into its folder before."""

    commands: tuple[tuple[str, ...], ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Peer:
    """A server to compare with. `packages`: steps of pip, of each the first choice that works.

    `stands_before`: what it passes requests to, "mock" or "" if it has engines of its own. `wants_nats`, `wants_model`: what it
    must be given.
    """

    name: str
    about: str
    packages: tuple[tuple[tuple[str, ...], ...], ...]
    stands_before: str = "mock"
    wants_nats: bool = False
    wants_model: bool = False
    version: str = ""

    def launch(self, places: Places) -> Launch:
        return _LAUNCHES[self.name](places)


def _litellm(places: Places) -> Launch:
    params = {"model": f"openai/{MODEL}", "api_base": f"http://127.0.0.1:{places.back_end_port}/v1", "api_key": "none"}
    open_to_all = {"dangerously_permit_weak_or_unset_master_key": True}  # as Headrace without keys: both judge no caller
    config = {"model_list": [{"model_name": MODEL, "litellm_params": params}], "litellm_settings": {"telemetry": False}}
    config |= {"general_settings": open_to_all}
    command = (str(places.programs / "litellm"), "--config", "config.yaml", "--host", "127.0.0.1", "--port", str(places.port))
    environment = {"LITELLM_LOG": "ERROR", "LITELLM_LOCAL_MODEL_COST_MAP": "True", "LITELLM_TELEMETRY": "False"}
    return Launch((command,), environment, {"config.yaml": json.dumps(config)})  # JSON is YAML


def _rust_router(program: tuple[str, ...], places: Places, level: str) -> Launch:
    command = (str(places.programs / program[0]), *program[1:], "--host", "127.0.0.1", "--port", str(places.port))
    command += ("--worker-urls", f"http://127.0.0.1:{places.back_end_port}", "--policy", "round_robin", "--log-level", level)
    command += ("--prometheus-port", str(places.metrics_port))
    return Launch((command,))


def _vllm_router(places: Places) -> Launch:
    return _rust_router(("vllm-router",), places, "warning")


def _smg(places: Places) -> Launch:
    return _rust_router(("smg", "launch"), places, "warn")


def _dynamo(places: Places) -> Launch:
    (planes := ["--discovery-backend", "file", "--request-plane", "tcp"]).extend(("--event-plane", "nats"))
    python = str(places.python)
    frontend = (python, "-m", "dynamo.frontend", *planes, "--router-mode", "kv", "--http-port", str(places.port))
    mocker = (python, "-m", "dynamo.mocker", *planes, "--model-path", str(places.model), "--model-name", MODEL)
    mocker += ("--num-workers", "4", "--speedup-ratio", "1000", "--block-size", "64")
    environment = {
        "NATS_SERVER": f"nats://127.0.0.1:{places.back_end_port}",
        "DYN_FILE_KV": str(places.folder / "kv"),
        "DYN_LOG": "warn",
    }
    return Launch((frontend, mocker), environment)


_LAUNCHES = {"litellm": _litellm, "vllm-router": _vllm_router, "smg": _smg, "dynamo": _dynamo}

PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "dynamo",
            "NVIDIA Dynamo, router mode kv, requests over TCP, events over NATS, its mocker with four workers",
            (
                (("--no-deps", "ai-dynamo==1.6.1", "ai-dynamo-runtime==1.6.1"),),
                tuple((torch,) for torch in TORCH),
                (
                    (
                        *("transformers", "pydantic<=2.13.5", "uvloop", "aiohttp", "certifi", "msgspec", "prometheus-client"),
                        *("pyzmq", "tqdm", "zstandard", "kubernetes<33", "redis"),
                    ),
                ),
            ),
            stands_before="",
            wants_nats=True,
            wants_model=True,
            version="1.6.1",
        ),
        Peer(
            "litellm",
            "LiteLLM's proxy, one process, before the mock back end",
            ((("litellm[proxy]==1.110.2",),),),
            version="1.110.2",
        ),
        Peer(
            "vllm-router",
            "vllm-router, round_robin, before the mock back end",
            ((("vllm-router==0.1.17",),),),
            version="0.1.17",
        ),
        Peer("smg", "Shepherd Model Gateway, round_robin, before the mock back end", ((("smg==1.13.0",),),), version="1.13.0"),
    )
}


def mock_command(port: int) -> tuple[str, ...]:
    """Return the command line of the mock back end."""
    return (sys.executable, "-m", "headrace.tools.bench.stand", str(port))


def headrace_command(port: int, data_dir: Path, routers: int) -> tuple[str, ...]:
    """Return what starts Headrace: one frontend, so many routers, one worker with the simulator."""
    program = Path(sys.executable).with_name("headrace")
    command = (str(program), "up", "--engine", "sim", "--workers", "1", "--routers", str(routers), "--no-console")
    return (*command, "--port", str(port), "--data-dir", str(data_dir), "--log-level", "warning")


INSTALL_S = 1800.0
STAMP = ".installed"


class NotInstalled(Exception):
    """A peer cannot be had here. The message says why."""


def python_of(folder: Path) -> Path:
    return folder / "bin" / "python"


def installed(peer: Peer, folder: Path) -> bool:
    """Return whether an earlier run has installed these very packages."""
    try:
        return (folder / STAMP).read_text() == repr(peer.packages)
    except OSError:
        return False


def install(peer: Peer, folder: Path, *, timeout_s: float = INSTALL_S) -> None:
    """Install a peer, unless that was done before. What pip does is in `pip.log` there. Raises NotInstalled."""
    if installed(peer, folder):
        return
    shutil.rmtree(folder, ignore_errors=True)
    try:
        subprocess.run([sys.executable, "-m", "venv", str(folder)], check=True, timeout=timeout_s, capture_output=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise NotInstalled(f"no environment could be made in {folder}: {error}") from error
    for choices in peer.packages:
        if not any(_pip(folder, words, timeout_s) for words in choices):
            raise NotInstalled(f"pip could not install {' '.join(choices[-1])}: see {folder / 'pip.log'}")
    (folder / STAMP).write_text(repr(peer.packages))


def _pip(folder: Path, words: tuple[str, ...], timeout_s: float) -> bool:
    command = [str(python_of(folder)), "-m", "pip", "--disable-pip-version-check", "--no-input", "install", "-q", *words]
    with (folder / "pip.log").open("ab") as log:
        try:
            return (
                subprocess.run(
                    command, check=False, stdout=log, stderr=log, stdin=subprocess.DEVNULL, timeout=timeout_s
                ).returncode
                == 0
            )
        except subprocess.TimeoutExpired:
            return False


STOP_S = 20.0


@contextmanager
def running(command: Sequence[str], log: Path, environment: Mapping[str, str], folder: Path) -> Iterator[int]:
    """Run a process in a session of its own, which is ended as a whole. Yields its id. Raises OSError."""
    with log.open("wb") as out:
        process = subprocess.Popen(
            command,
            cwd=folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        yield process.pid
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(STOP_S)
        _kill_session(process.pid)
        process.wait()


def _kill_session(pid: int) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(pid, signal.SIGKILL)


def tree(roots: Sequence[int]) -> set[int]:
    """Return these processes and their descendants, of those that run now."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rsplit(") ", 1)[1].split()[1])
            except (FileNotFoundError, ProcessLookupError):
                continue
    found = {pid for pid in roots if pid in parents}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found


def used_s(pids: set[int]) -> float:
    """Return the CPU seconds of those that still run."""
    spent = 0.0
    for pid in pids:
        try:
            spent += usage(pid).cpu_s
        except FileNotFoundError:
            continue
    return spent


def rss_mib(pids: set[int]) -> float:
    found = 0.0
    for pid in pids:
        try:
            found += usage(pid).rss / 2**20
        except FileNotFoundError:
            continue
    return found


def wait_until(ready: Callable[[], bool], timeout_s: float, roots: Sequence[int]) -> bool:
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if ready():
            return True
        if not all(_runs(pid) for pid in roots):
            return False
        time.sleep(0.2)
    return False


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


START_S = 90.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs: its port, its processes, and those of its back end."""

    port: int
    roots: tuple[int, ...]
    back_end: tuple[int, ...] = ()


def free_port() -> int:
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
