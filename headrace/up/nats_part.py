"""Runs the NATS server of `headrace up`, or names an existing one."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import structlog

from headrace.config.build_settings import server_settings
from headrace.config.settings import Settings
from headrace.config.values import mask_url
from headrace.errors import StartFailed
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import JetStreamError
from headrace.up.restart_policy import Restart, RestartState

_log = structlog.get_logger()

_WATCH_EVERY_S = 0.25


class NatsPart:
    """The NATS server of a deployment: an embedded one, or an existing one.

    An embedded server that crashed is restarted on the same port and folder, so that the parts find it again by themselves.
    """

    def __init__(self, settings: Settings) -> None:
        self._external: tuple[str, ...] = settings["nats.url"]
        self._is_external = bool(self._external or settings["nats.context"])
        self._server: EmbeddedServer | None = None
        if not self._is_external:
            self._server = EmbeddedServer(Path(settings["data_dir"]).resolve() / "nats", server_settings(settings))
        self._state = RestartState(essential=True)

    async def start(self) -> None:
        """Start the server and return once it takes connections. Raises StartFailed."""
        if self._server is None:
            return
        loop = asyncio.get_running_loop()
        try:
            await self._server.start_async()
        except (JetStreamError, OSError) as error:
            raise StartFailed(f"the NATS server does not start: {error}") from error
        self._state.started(loop.time())

    async def keep(self, on_change: Callable[[], None]) -> None:
        """Restart the server whenever it has ended, and call `on_change`, until cancelled."""
        server = self._server
        if server is None:
            return
        loop = asyncio.get_running_loop()
        while True:
            await asyncio.sleep(_WATCH_EVERY_S)
            if server.running:
                continue
            decision = self._state.exited(loop.time(), exit_code=1, serving=True)
            wait_s = decision.after_s if isinstance(decision, Restart) else 0.0
            _log.warning("part.crashed", part="nats", restart_in_s=wait_s, crashes=self._state.crashes)
            on_change()
            await asyncio.sleep(wait_s)
            self._state.started(loop.time())
            try:
                await server.restart_async()
            except (JetStreamError, OSError) as error:
                _log.error("part.start_failed", part="nats", error=str(error))
            on_change()

    async def stop(self, *, at_once: bool) -> None:
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

    def describe(self) -> dict[str, Any]:
        if self._server is None:
            return {"url": ",".join(mask_url(url) for url in self._external) or None, "pid": None, "monitoring_url": None}
        return {"url": self._server.url, "pid": self._server.pid, "monitoring_url": self._server.monitoring_url}
