"""Reads command lines that deployments give to `headrace` as the command itself would, so that a wrong one fails a test."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from headrace.cli import build_parser, command_names
from headrace.config.build_settings import frontend_settings, router_options, worker_settings
from headrace.config.options import options_of
from headrace.config.settings import Settings, load

PARTS = ("frontend", "router", "worker", "console", "planner", "steward")


def is_known(command: str) -> bool:
    """True if this version has the command."""
    return command in command_names()


def read(words: Sequence[str], environ: Mapping[str, str] = {}) -> Settings:  # it is not written to
    """Return the settings of such a command line. Fails for what is unknown, and for values wrong together."""
    command = words[0]
    assert command in PARTS, f"{command} is no part of a deployment"
    parsed = vars(build_parser(command).parse_args(list(words)))
    flags = {option.key: parsed.get(option.dest) for option in options_of(command)}  # type: ignore[arg-type]
    settings = load(command, flags=flags, environ=environ)  # type: ignore[arg-type]
    assert settings.warnings == ()
    build = {"frontend": frontend_settings, "router": router_options, "worker": worker_settings}.get(command)
    if build is not None:
        build(settings)
    return settings


def drain_s(settings: Settings, command: str) -> float:
    """Return how long a part may take after SIGTERM."""
    return float(settings[f"{command}.drain_grace_s"]) if command in ("frontend", "router", "worker") else 0.0
