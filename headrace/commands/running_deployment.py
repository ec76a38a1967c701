"""Finds the running deployment for commands that were given no address or no login: its run file has both."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from pathlib import Path

from headrace.config.flags import read_settings
from headrace.config.options import Command
from headrace.config.secrets import MASK
from headrace.config.settings import Settings
from headrace.up.runfile import RunningDeployment, read_run_file, run_file_of

_ADDRESSES = ("nats.url", "nats.context")
_OPERATOR = ("operator",)
_CREDENTIALS = ("nats.user", "nats.token", "nats.credentials", "nats.nkey_seed")


def located_settings(
    parsed: argparse.Namespace, command: Command = "control", *, logins: Sequence[str] = _OPERATOR
) -> Settings:
    """Return the settings of a command line, and of the running `headrace up` what it was not given.

    `logins`: the names that would do at a server that asks for them, the best one first.
    Raises SettingsError, and StartFailed for a run file that cannot be read.
    """
    settings = read_settings(parsed, command)
    if settings["nats.context"]:
        return settings
    running = read_run_file(_data_dir(settings))
    if running is None:
        return settings
    if not settings["nats.url"]:
        return settings.completed(_values(running, logins), str(running.path))
    return _logged_in(settings, running, logins)


def part_settings(settings: Settings, logins: Iterable[str]) -> Settings:
    """Return the settings of a part that was started by hand, with a login where its address is that of the running `up`.

    `logins`: the names that would do, the best one first. Raises StartFailed for a run file that cannot be read.
    """
    if settings["nats.context"] or not settings["nats.url"]:
        return settings
    running = read_run_file(_data_dir(settings))
    return settings if running is None else _logged_in(settings, running, logins)


def _logged_in(settings: Settings, running: RunningDeployment, logins: Iterable[str]) -> Settings:
    """Return settings with the first of these logins, if they lead to this deployment and bring none of their own."""
    if any(settings[key] for key in _CREDENTIALS) or not running.serves(settings["nats.url"]):
        return settings
    context = running.login(logins)
    return settings if context is None else settings.completed({"nats.context": context}, str(running.path))


def looked_for(settings: Settings) -> str:
    """Return the end of the sentence that no server answers: where the address is from, and how to give another one."""
    path = run_file_of(_data_dir(settings))
    if str(path) not in (settings.source(key) for key in _ADDRESSES):
        if _has_address(settings):
            return ""
        return (
            f"; no address was given, and no `headrace up` runs with the data folder {path.parents[1]} (there is no {path}): "
            "give --nats URL or --data-dir PATH"
        )
    running = read_run_file(_data_dir(settings))
    if running is None:
        return f"; the address was in {path}, and its `headrace up` has just ended"
    if not running.alive:
        return f"; the address is from {path}, whose `headrace up` (pid {running.pid}) no longer runs"
    return f"; the address is from {path}, whose `headrace up` (pid {running.pid}) still runs"


def _has_address(settings: Settings) -> bool:
    return any(settings[key] for key in _ADDRESSES)


def _data_dir(settings: Settings) -> Path:
    return Path(settings["data_dir"]).resolve()


def _values(running: RunningDeployment, logins: Iterable[str]) -> dict[str, object]:
    """Return the settings that reach the deployment. What it logs in with is not in its run file, and has to be given."""
    values: dict[str, object] = {"prefix": running.prefix, "namespace": running.namespace}
    if running.nats_context:
        values["nats.context"] = running.login(logins) or running.nats_context
    if running.nats_url:
        values["nats.url"] = tuple(url.replace(f"{MASK}@", "") for url in running.nats_url.split(","))
    return values
