"""Adds the commands that run a part of a deployment to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.cli import help_texts
from headrace.cli.help_flags import add_help_flags
from headrace.cli.workers_and_routers import add_router_questions, add_worker_commands
from headrace.commands.running_deployment import part_settings
from headrace.config.flags import add_setting_flags, read_settings
from headrace.config.options import Command


def add_up(commands: Any, about: str) -> None:
    """Add `headrace up`."""
    _add(commands, "up", _run_up, about=about, epilog=help_texts.UP)


def add_frontend(commands: Any, about: str) -> None:
    """Add `headrace frontend`."""
    _add(commands, "frontend", _run_frontend, about=about, epilog=help_texts.FRONTEND)


def add_worker(commands: Any, about: str) -> None:
    """Add `headrace worker` and the commands below it."""
    add_worker_commands(_add(commands, "worker", _run_worker, about=about, epilog=help_texts.WORKER))


def add_router(commands: Any, about: str) -> None:
    """Add `headrace router` and the commands below it."""
    add_router_questions(_add(commands, "router", _run_router, about=about, epilog=help_texts.ROUTER))


def _add(
    commands: Any,
    name: Command,
    run: Callable[[argparse.Namespace], int],
    *,
    about: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        usage=f"headrace {name} [options]",
        description=about[0].upper() + about[1:] + ".",
        epilog=f"{epilog}\n\n{help_texts.EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(run=run, prog=f"headrace {name}")
    add_help_flags(parser, add_setting_flags(parser, name), usual=help_texts.USUAL[name])
    return parser


def _run_up(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_up

    return run_up(read_settings(parsed, "up"))


def _run_frontend(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_frontend

    return run_frontend(part_settings(read_settings(parsed, "frontend"), ["ingress"]))


def _run_worker(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_worker
    from headrace.up.server_logins import logins_by_hand

    settings = read_settings(parsed, "worker")
    return run_worker(part_settings(settings, logins_by_hand(settings)))


def _run_router(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_router

    return run_router(part_settings(read_settings(parsed, "router"), ["router"]))
