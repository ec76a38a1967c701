"""Describes the console of one `headrace up`: its process, its port, and the link that holds its key."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace.base.errors import SettingsError
from headrace.config.secrets import without_secrets_of_others
from headrace.config.settings import Settings
from headrace.frontend.auth.exposure import is_loopback
from headrace.up.frontend_probe import base_url, choose_port
from headrace.up.managed_process import ManagedProcess
from headrace.up.restart_policy import RestartState
from headrace.up.server_logins import ServerLogins

CONSOLE_GRACE_S = 3.0
KEY_BYTES = 24


@dataclass(frozen=True, slots=True, kw_only=True)
class ConsolePart:
    """The console's process, its address, and the key without which it only shows."""

    part: ManagedProcess
    url: str
    key: str

    @property
    def link(self) -> str:
        """The link for the user of the deployment. Browsers send nothing of what stands behind the #."""
        return f"{self.url}#key={self.key}"

    def describe(self) -> dict[str, Any]:
        """Return the part as the run file shows it: without the key."""
        return {**self.part.describe(), "url": self.url}


def console_part(
    settings: Settings, environment: Mapping[str, str], *, frontend: str, taken: set[int], logins: ServerLogins | None
) -> ConsolePart | None:
    """Return the console of a deployment, None if it is to have none. `frontend` is the frontend's address.

    Raises SettingsError for a port that was asked for and is taken. Its port is added to `taken`.
    """
    if not settings["up.console"]:
        return None
    host: str = settings["console.host"]
    port = _port(settings, host, taken)
    key: str = settings["console.key"] or secrets.token_urlsafe(KEY_BYTES)
    context = logins.operator_context if logins is not None else None
    open_here = is_loopback(host) and is_loopback(settings["frontend.host"]) and not _asks_for_keys(settings)
    env = {
        **without_secrets_of_others(environment, "console"),
        **({"HEADRACE_NATS_CONTEXT": context} if context else {}),
        "HEADRACE_CONSOLE_KEY": key,
        "HEADRACE_CONSOLE_FRONTEND": frontend,
        "HEADRACE_CONSOLE_PRIVATE": str(not open_here or settings["console.private"]).lower(),
        "HEADRACE_CONSOLE_ALLOW_KILL": str(open_here or settings["console.allow_kill"]).lower(),
    }
    tls = settings["console.tls_cert"] is not None
    part = ManagedProcess("console", ("console", "--console-port", str(port)), env, RestartState(essential=False))
    return ConsolePart(part=part, url=f"{base_url(host, port, tls=tls)}/console", key=key)


def _port(settings: Settings, host: str, taken: set[int]) -> int:
    wanted: int = settings["console.port"]
    while True:
        try:
            port = choose_port(host, wanted, setting="console")
        except SettingsError:
            if settings.given("console.port"):
                raise
            port = 0
        if port and port not in taken:
            taken.add(port)
            return port
        wanted = 0


def _asks_for_keys(settings: Settings) -> bool:
    return bool(settings["api_key"]) or settings["frontend.auth"] == "keys" or settings["frontend.jwt_keys"] is not None
