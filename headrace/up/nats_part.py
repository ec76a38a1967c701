"""Runs the NATS server of `headrace up`, or names an existing one."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import structlog

from headrace.base.errors import EXIT_CONFIGURATION, StartFailed
from headrace.config.build_settings import server_settings
from headrace.config.secrets import mask_urls
from headrace.config.settings import Settings
from headrace.jetstream.embedded_server import EmbeddedServer, StoreKeyUnusable
from headrace.jetstream.errors import JetStreamError
from headrace.up.certificate_files import CertificateFiles
from headrace.up.provisioner import Provisioner
from headrace.up.restart_policy import Backoff, Restart, RestartState
from headrace.up.server_logins import ServerLogins
from headrace.up.stuck_store import ROOM_BYTES, StuckStore, free_bytes
from headrace.up.worker_logins import WorkerLogins

_log = structlog.get_logger()

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
        from headrace.up.stored_streams import StoredStreams

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
        """Start the server again whenever it stores nothing although there is room, until cancelled.

        `stuck` asks whether requests cannot be stored; `on_change` is called after each start.
        """
        server = self._server
        if server is None:
            return
        loop = asyncio.get_running_loop()
        rule = StuckStore()
        while True:
            await asyncio.sleep(_ASK_EVERY_S)
            try:
                free = free_bytes(server.data_dir)
            except OSError:
                continue  # the folder is away; nats-server cannot be started there either
            if not rule.restart_due(loop.time(), stuck=await stuck(), free_bytes=free) or not server.running:
                continue
            if not rule.was_full and not await server.answers_async():
                continue  # it stands still, or is being started
            _log.warning(
                "nats.restarting",
                reason="it stores nothing" + (", and its disk, which was full, has room again" if rule.was_full else ""),
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
