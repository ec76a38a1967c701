"""The NATS server of `headrace up`: its process, certificates, streams, and restarts when its store is stuck."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from headrace.base.errors import EXIT_CONFIGURATION, StartFailed
from headrace.config.build_settings import connect_options, server_settings, subjects
from headrace.config.settings import Settings
from headrace.config.values import mask_urls
from headrace.jetstream.embedded_server import CONFIG, KEY_ID, EmbeddedServer, StoreKeyUnusable
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.logins.roles import streams_account
from headrace.jetstream.tasks import TaskScope
from headrace.up.restart_policy import Backoff, Restart, RestartState
from headrace.up.server_logins import ServerLogins, WorkerLogins

if TYPE_CHECKING:
    from headrace.jetstream.client import Connection


class CertificateFiles:
    """Files whose changes are looked for. One that is missing for a moment, while it is replaced, has not changed."""

    def __init__(self, paths: Iterable[str | None]) -> None:
        self._paths = [Path(path).expanduser() for path in paths if path is not None]
        self._seen = {path: _stamp(path) for path in self._paths}

    def changed(self) -> bool:
        """Return True if one of the files is another one than at the last call."""
        found = {path: stamp for path in self._paths if (stamp := _stamp(path)) is not None}
        changed = any(self._seen[path] != stamp for path, stamp in found.items())
        self._seen |= found
        return changed


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino


# Makes streams, buckets and consumers of a deployment as its operator, where the server asks for logins and the parts may
# not.
#
# Streams are made once at the start and again after each restart of the server, consumers when a part asks for them
# (`headrace.jetstream.logins.steward`).

_log = structlog.get_logger()


class Provisioner:
    """The operator's connection of `headrace up`."""

    def __init__(self) -> None:
        self._connection: Connection | None = None
        self._tasks = TaskScope()

    async def start(self, settings: Settings) -> None:
        """Make the streams, again after each reconnect, and make consumers for parts until `stop`.

        `settings` log in as the operator. Raises StartFailed.
        """
        from headrace.jetstream.client import Connection
        from headrace.jetstream.logins.steward import Steward
        from headrace.jetstream.provision import ensure_topology
        from headrace.jetstream.topology import Topology

        try:
            options = connect_options(settings, name="headrace up (operator)")
            topology = Topology(subjects(settings), replicas=options.replicas)
            connection = await Connection.connect(options, subjects=topology.subjects)
            self._connection = connection
            await ensure_topology(connection, topology)
            await self._tasks.__aenter__()
            await Steward(connection, topology, self._tasks).start()
        except JetStreamError as error:
            await self.stop()
            raise StartFailed(f"the streams cannot be made: {error}") from error

        async def again() -> None:  # memory streams vanish with a server restart
            await ensure_topology(connection, topology)

        connection.on_reconnect(again)
        _log.info("up.provisioned")

    async def stop(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            await connection.close()
        await self._tasks.__aexit__(None, None, None)


# Takes the stored streams of a data folder along when its NATS server begins or ceases to ask for logins of roles.
#
# nats-server keeps the streams of each account in a folder with the account's name: `$G` without logins and with the one of
# the deployment, else that of `streams_account`. While no server runs, another account has them once their folders lie there.
# Only one account has streams at a time: the server is not healthy while there is the folder of an account that it does not
# know.

WITHOUT_LOGINS = "$G"
_STREAMS = "streams"
_OLD_SERVER_S = 15.0  # longer than it takes to stop
_AGAIN_S = 0.05


class StreamsNotMoved(StartFailed):
    """Stored streams cannot be taken along, and would be out of sight."""

    exit_code = EXIT_CONFIGURATION


class StoredStreams:
    """The streams in the data folder of a deployment's own server."""

    def __init__(self, folder: Path, prefix: str) -> None:
        """`folder` is that of the embedded server, `prefix` that of the deployment that is started."""
        self._folder = folder
        self._accounts = folder / "store" / "jetstream"
        self._with_logins = streams_account(prefix)

    def bring(self, *, logins: bool) -> None:
        """Move what is stored where the server that is to be started does not see it. Raises StreamsNotMoved.

        Streams that two accounts have are never put together: those of the last start are used, if it was of the same kind.
        """
        wanted = self._with_logins if logins else WITHOUT_LOGINS
        target = self._accounts / wanted / _STREAMS
        for other in self._others(wanted):
            source = self._accounts / other / _STREAMS
            found = self._streams(source)
            if twice := sorted(found & self._streams(target)):
                self._leave(twice, other, wanted)
                continue
            if (self._folder / KEY_ID).exists():  # nats-server derives the keys of streams from their account
                raise StreamsNotMoved(
                    f"the streams in {source} are encrypted for their account and cannot be moved to {target}: start "
                    f"{_flag(not logins)}, or, to begin with an empty store, move {self._folder / 'store'} away"
                )
            self._wait_for_old_server()
            try:
                self._move(source, target, found)
            except OSError as error:
                raise StreamsNotMoved(
                    f"stored streams cannot be moved from {source} to {target} ({error.strerror}): make both writable, or "
                    f"start {_flag(not logins)} to go on as before"
                ) from None
            _log.info("nats.streams_moved", logins=logins, streams=len(found), account=wanted, before=other)

    def _others(self, wanted: str) -> list[str]:
        try:
            return sorted(path.name for path in self._accounts.iterdir() if path.is_dir() and path.name != wanted)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StreamsNotMoved(f"stored streams in {self._accounts} cannot be read: {error.strerror}") from None

    def _streams(self, folder: Path) -> set[str]:
        try:
            return {path.name for path in folder.iterdir() if path.is_dir()}
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except OSError as error:
            raise StreamsNotMoved(f"stored streams in {folder} cannot be read: {error.strerror}") from None

    def _move(self, source: Path, target: Path, streams: set[str]) -> None:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in sorted(streams):
            (source / name).rename(target / name)
        for folder in (source, source.parent):  # of an account that the server does not know
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def _leave(self, twice: list[str], other: str, wanted: str) -> None:
        """Leave streams where they are: there are two sets. Raises StreamsNotMoved unless the wanted one was used last."""
        unused = self._accounts / other
        if other == WITHOUT_LOGINS and self._last_account() == wanted:
            _log.warning("nats.streams_unseen", folder=str(unused), streams=len(twice), meaning="of an earlier start; not used")
            return
        raise StreamsNotMoved(
            f"streams ({len(twice)}, {twice[0]} among them) are stored twice: in {unused}, and in {self._accounts / wanted}, "
            f"which this start would use. {self._last_account() or 'Neither'} was used last. Move the folder that you do not "
            f"want out of {self._accounts}, or start {_flag(wanted == WITHOUT_LOGINS)}"
        )

    def _last_account(self) -> str | None:
        """Return the account with the streams of the last server that was started, None if there was none."""
        try:
            lines = (self._folder / CONFIG).read_text().splitlines()
        except OSError:
            return None
        return self._with_logins if f"  {self._with_logins}: {{" in lines else WITHOUT_LOGINS

    def _wait_for_old_server(self) -> None:
        """Wait until no server of a killed `up` has the streams open. Raises StreamsNotMoved."""
        deadline = time.monotonic() + _OLD_SERVER_S
        while running := list(self._servers()):
            if time.monotonic() > deadline:
                raise StreamsNotMoved(
                    f"a nats-server with the process id {running[0]} still uses {self._folder}: stop it first"
                )
            time.sleep(_AGAIN_S)

    def _servers(self) -> Iterator[int]:
        for path in (self._folder / "run").glob("nats-server_*.ports"):
            number = path.stem.rpartition("_")[2]
            if number.isdecimal() and _uses(int(number), self._folder):
                yield int(number)


def _uses(pid: int, folder: Path) -> bool:
    """Return whether a process is the server with this data folder, as far as the system tells."""
    try:
        os.kill(pid, 0)
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, OverflowError):
        return False
    return os.fsencode(folder / CONFIG) in command


def _flag(logins: bool) -> str:
    return f"with --nats-login {'roles' if logins else 'one'}"


# Decides when `headrace up` starts its nats-server again because it stores nothing any more.
#
# nats-server 2.15 takes messages for a stream that once could not be written, and never confirms them, also when the disk has
# room again. Only another start cures that. Until there is room it would cure nothing, so the server is left alone while the
# disk is full: leases are in memory, and streams go on. Its health names such streams, whichever they are and however short the
# disk was full; a store that confirms nothing for another reason is seen by what frontends report.

_MIB = 1 << 20

FULL_BYTES = 1 * _MIB  # less room than this counts as a full disk
ROOM_BYTES = 16 * _MIB  # with less room than this another start would not help for long
AFTER_ERROR_S = 1.0  # of a stream that the server itself calls unwritable, once there is room
AFTER_FULL_S = 3.0  # of storing nothing, once a disk that was full has room
UNEXPLAINED_S = 20.0  # of storing nothing on a disk that was not seen full
AGAIN_FIRST_S = 3.0  # between two such starts; doubled while they do not help
AGAIN_MOST_S = 300.0


class StuckStore:
    """The rule. Times are seconds of any monotonic clock."""

    def __init__(self) -> None:
        self.was_full = False
        self._since_s: float | None = None  # nothing is stored since
        self._not_before_s = 0.0
        self._again_s = AGAIN_FIRST_S

    def restart_due(self, now_s: float, *, stuck: bool, free_bytes: int, unwritable: bool = False) -> bool:
        """Return True when the server should be started again.

        `stuck`: requests cannot be stored just now. `unwritable`: the server says that a stream has met a write error.
        """
        self.was_full = self.was_full or free_bytes < FULL_BYTES
        if not stuck and not unwritable:
            self._since_s = None
            if now_s >= self._not_before_s:
                self._again_s = AGAIN_FIRST_S
            return False
        if self._since_s is None:
            self._since_s = now_s
        patience_s = AFTER_ERROR_S if unwritable else AFTER_FULL_S if self.was_full else UNEXPLAINED_S
        return free_bytes >= ROOM_BYTES and now_s >= self._not_before_s and now_s - self._since_s >= patience_s

    def restarted(self, now_s: float) -> None:
        """Note that the server was started again."""
        self.was_full = False
        self._since_s = None
        self._not_before_s = now_s + self._again_s
        self._again_s = min(2 * self._again_s, AGAIN_MOST_S)


def free_bytes(folder: Path) -> int:
    """Return how much may still be written into a folder."""
    return shutil.disk_usage(folder).free


_WATCH_EVERY_S = 0.25
_ASK_EVERY_S = 1.0
_CERTIFICATES_S = 2.0  # as often the frontends look at theirs
_MOST_FAILED_STARTS = 5
_MOST_BACKOFF_S = 2.0  # nothing works without it, so a crash more should not cost an outage of half a minute


class NatsPart:
    """The NATS server of a deployment: an embedded one, or an existing one.

    An embedded server that crashed, or that stores nothing any more after its disk was full, is restarted on the same port and
    folder, so that the parts find it again by themselves.
    """

    def __init__(self, settings: Settings) -> None:
        self._external: tuple[str, ...] = settings["nats.url"]
        self._is_external = bool(self._external or settings["nats.context"])
        self._settings = settings
        self._server: EmbeddedServer | None = None
        folder = Path()
        if not self._is_external:
            folder = Path(settings["data_dir"]).resolve() / "nats"
            self._server = EmbeddedServer(folder, server_settings(settings))
        self.logins = ServerLogins(settings, folder, kind="none" if self._is_external else settings["server.login"])
        self.worker_logins = WorkerLogins(self.logins, self._server, self._apply_logins)
        self._own_extra = self._server.settings.extra if self._server is not None else ""
        self._provisioner = Provisioner()
        self._state = RestartState(essential=True, backoff=Backoff(most_s=_MOST_BACKOFF_S))
        self._mending = False
        self._failed_starts = 0  # in a row, with room on the disk

    async def start(self) -> None:
        """Start the server and return once it takes connections and, where its logins are of roles, has its streams.

        What was stored under the other kind of start is taken along. Raises StartFailed.
        """
        server = self._server
        if server is None:
            return
        await asyncio.to_thread(self._bring_streams, server)
        self._apply_logins()
        loop = asyncio.get_running_loop()
        try:
            await server.start_async()
        except StoreKeyUnusable as error:
            failure = StartFailed(f"the NATS server does not start: {error}")
            failure.exit_code = EXIT_CONFIGURATION
            raise failure from error
        except (JetStreamError, OSError) as error:
            raise StartFailed(f"the NATS server does not start: {error}") from error
        self._state.started(loop.time())
        self.logins.write_contexts(server.url)
        if self.logins.by_role:
            await self._provisioner.start(self.as_operator(self._settings))

    def _bring_streams(self, server: EmbeddedServer) -> None:

        StoredStreams(server.data_dir, self.logins.subjects.prefix).bring(logins=self.logins.by_role)

    def _apply_logins(self) -> None:
        if self._server is not None:
            extra = f"{self._own_extra}\n{self.logins.server_config()}"
            self._server.settings = dataclasses.replace(self._server.settings, extra=extra)

    async def keep(self, on_change: Callable[[], None]) -> None:
        """Restart the server whenever it has ended, and call `on_change`, until cancelled.

        Raises StartFailed when it has not started several times in a row although its disk has room.
        """
        server = self._server
        if server is None:
            return
        loop = asyncio.get_running_loop()
        certificates = CertificateFiles(self._settings[f"server.tls_{name}"] for name in ("cert", "key", "client_ca"))
        look_at = loop.time() + _CERTIFICATES_S
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if loop.time() >= look_at:
                look_at = loop.time() + _CERTIFICATES_S
                if certificates.changed():
                    _log.info("nats.certificates_renewed")
                    server.reload()
            if server.running or self._mending:
                continue
            decision = self._state.exited(loop.time(), exit_code=1, serving=True)
            wait_s = decision.after_s if isinstance(decision, Restart) else 0.0
            _log.warning("part.crashed", part="nats", restart_in_s=wait_s, crashes=self._state.crashes)
            on_change()
            await asyncio.sleep(wait_s)
            await self._restart(server)
            on_change()

    async def mend(self, stuck: Callable[[], Awaitable[bool]], on_change: Callable[[], None]) -> None:
        """Start the server again whenever it does not store although there is room, until cancelled.

        `stuck` asks whether requests cannot be stored; `on_change` is called after each start.
        """
        server = self._server
        if server is None:
            return
        loop = asyncio.get_running_loop()
        rule = StuckStore()
        said: tuple[str, ...] = ()
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            try:
                free = free_bytes(server.data_dir)
            except OSError:
                continue  # the folder is away; nats-server cannot be started there either
            health = await server.health_async()
            unwritable = health.unwritable
            if unwritable != said and (unwritable or health.ok):
                said = unwritable
                if unwritable:
                    _log.error("nats.unwritable", streams=unwritable, data_dir=str(server.data_dir), free_bytes=free)
                else:
                    _log.info("nats.writable")
            is_stuck = not unwritable and await stuck()
            due = rule.restart_due(loop.time(), stuck=is_stuck, free_bytes=free, unwritable=bool(unwritable))
            if not due or not server.running:
                continue
            if not (unwritable or rule.was_full or health.serves):
                continue  # it stands still, or is being started
            what = f"it writes nothing to {', '.join(unwritable)}" if unwritable else "it stores nothing"
            _log.warning(
                "nats.restarting",
                reason=what + (", and its disk, which was full, has room again" if rule.was_full else ""),
                data_dir=str(server.data_dir),
                free_bytes=free,
            )
            self._mending = True
            try:
                await self._restart(server)
            finally:
                self._mending = False
            rule.restarted(loop.time())
            on_change()

    async def _restart(self, server: EmbeddedServer) -> None:
        self._state.started(asyncio.get_running_loop().time())
        try:
            await server.restart_async()
        except OSError as error:  # the folder may come back
            _log.error("part.start_failed", part="nats", error=str(error))
        except JetStreamError as error:
            _log.error("part.start_failed", part="nats", error=str(error))
            self._failed_starts += _has_room(server.data_dir)
            if self._failed_starts >= _MOST_FAILED_STARTS:
                raise StartFailed(f"the NATS server does not start, tried {self._failed_starts} times: {error}") from error
        else:
            self._failed_starts = 0

    async def stop(self, *, at_once: bool) -> None:
        await self._provisioner.stop()
        server = self._server
        if server is not None:
            if at_once:
                server.kill()
            else:
                await server.stop_async()

    @property
    def url(self) -> str | None:
        """Return the address of the embedded server, None for an existing one."""
        return None if self._server is None else self._server.url

    def environment(self) -> dict[str, str]:
        """Return the variables that give the parts the address of the embedded server."""
        return {} if self._server is None else {"HEADRACE_NATS_URL": self._server.url}

    def as_operator(self, settings: Settings) -> Settings:
        """Return settings that reach the server and log in as the operator, where it asks for a login."""
        values: dict[str, Any] = {"nats.url": (self._server.url,)} if self._server is not None else {}
        if self.logins.operator_context is not None:
            values["nats.context"] = self.logins.operator_context
        return settings.completed(values, "headrace up")

    def describe(self) -> dict[str, Any]:
        if self._server is None:
            return {"url": ",".join(mask_urls(self._external)) or None, "pid": None, "monitoring_url": None}
        return {"url": self._server.url, "pid": self._server.pid, "monitoring_url": self._server.monitoring_url}


def _has_room(folder: Path) -> bool:
    try:
        return free_bytes(folder) >= ROOM_BYTES
    except OSError:
        return False
