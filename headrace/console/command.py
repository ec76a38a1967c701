"""Runs `headrace console`: beside a running deployment, or as a part of `headrace up`."""

from __future__ import annotations

import os
import secrets
import sys
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

from headrace.base.errors import SettingsError
from headrace.commands.run import run_part, start_part
from headrace.config.build_settings import connect_options, subjects
from headrace.config.settings import Settings
from headrace.console.app import ConsoleOptions
from headrace.frontend.auth.exposure import is_loopback
from headrace.up.process import SUPERVISOR_PID
from headrace.up.runfile import read_run_file

KEY_BYTES = 24
LEAST_KEY = 16  # characters of a key that an operator chooses


def run_console_command(settings: Settings) -> int:
    """Run `headrace console`. Raises SettingsError."""
    given: str = settings["console.key"] or ""
    if given and len(given) < LEAST_KEY:
        raise SettingsError(f"console.key ({settings.source('console.key')}) has {len(given)} characters, it needs {LEAST_KEY}")
    key = given or secrets.token_urlsafe(KEY_BYTES)
    if settings["console.tls_key"] and not settings["console.tls_cert"]:
        raise SettingsError(f"console.tls_key ({settings.source('console.tls_key')}) needs console.tls_cert")
    in_up = SUPERVISOR_PID in os.environ  # which prints the link with its own ready text
    start_part(settings, {"component": "console"})
    options = connect_options(settings, name="headrace console")
    logs_in = any((options.user, options.token, options.credentials, options.nkey_seed))
    host: str = settings["console.host"]
    console = ConsoleOptions(
        host=host,
        key=key,
        frontend=settings["console.frontend"] or _running_frontend(settings),
        may_kill=settings["console.allow_kill"],
        private=settings["console.private"] or logs_in or not is_loopback(host),
        tls_cert=settings["console.tls_cert"],
        tls_key=settings["console.tls_key"],
        data_dir=Path(settings["data_dir"]).resolve(),
    )

    def say(url: str) -> None:
        if not in_up:
            sys.stdout.write(f"The console is at {url}/console#key={key}\n")
            sys.stdout.flush()

    def start() -> Coroutine[Any, Any, int | None]:
        from headrace.console.run import run_console

        return run_console(console, options, subjects(settings), port=settings["console.port"], on_listening=say)

    return run_part(settings, start)


def _running_frontend(settings: Settings) -> str:
    running = read_run_file(Path(settings["data_dir"]).resolve())
    return running.url or "" if running is not None else ""
