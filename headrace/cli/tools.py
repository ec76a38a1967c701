"""Commands beside the parts: streams, benchmarks, replay, the model, the settings, the versions."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from headrace.cli.adapters import add_model_commands
from headrace.commands.groups import add_group
from headrace.config.flags import add_setting_flags, read_settings


def add_streams(commands: Any, *, complete: bool) -> None:
    """`headrace streams`; `complete`: with its actions."""
    if complete:
        from headrace.commands.streams import add_parser

        add_parser(commands)
    else:
        commands.add_parser("streams", help="plan, apply, show or purge what Headrace keeps in NATS")


def add_bench(commands: Any, *, complete: bool) -> None:
    """`headrace bench`; `complete`: with its actions."""
    if complete:
        from headrace.tools.replay_bench.command import add_parser

        add_parser(commands)
    else:
        commands.add_parser("bench", help="benchmarks that need neither a GPU nor a server")


def add_replay(commands: Any, *, complete: bool) -> None:
    """`headrace replay`; `complete`: with its actions."""
    if complete:
        from headrace.commands.replay import add_parser

        add_parser(commands)
    else:
        commands.add_parser("replay", help="rebuild the index of the past, or place its requests by another policy")


def add_model(commands: Any) -> None:
    """`headrace model`."""
    actions = add_group(commands, "model", about="list or forget the models that are known, prepare the bundled one")
    prepare = actions.add_parser(
        "prepare",
        help="download and convert the bundled small chat model, if that was not done yet",
        description="Make the bundled small chat model ready in <data-dir>/models and print its folder.",
        allow_abbrev=False,
    )
    add_setting_flags(prepare, "model")
    prepare.set_defaults(run=_run_model_prepare, prog="headrace model prepare")
    add_model_commands(actions)


def add_config(commands: Any) -> None:
    """`headrace config`."""
    config = commands.add_parser(
        "config",
        help="show the settings in force and where each comes from",
        description="Show the settings in force for a command, secrets masked, as TOML with the source of each value.",
        allow_abbrev=False,
    )
    config.add_argument(
        "command", nargs="?", choices=("up", "frontend", "worker", "router", "streams"), default="up", help="default: up"
    )
    config.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings")
    config.add_argument("--json", action="store_true", help="as JSON: key → value and source")
    config.set_defaults(run=_run_config, prog="headrace config")


def add_version(commands: Any) -> None:
    """`headrace version`."""
    version = commands.add_parser(
        "version", help="show versions of Headrace, NATS and the installed engines", allow_abbrev=False
    )
    version.add_argument("--json", action="store_true", help="as JSON")
    version.set_defaults(run=_run_version, prog="headrace version")


def _run_model_prepare(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_model_prepare

    return run_model_prepare(read_settings(parsed, "model"))


def _run_config(parsed: argparse.Namespace) -> int:
    from headrace.commands.info import show_config

    sys.stdout.write(show_config(read_settings(parsed, parsed.command), as_json=parsed.json))
    return 0


def _run_version(parsed: argparse.Namespace) -> int:
    from headrace.commands.info import show_versions

    sys.stdout.write(show_versions(as_json=parsed.json))
    return 0
