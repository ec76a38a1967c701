"""Adds `headrace init` and `headrace steward` to the command line."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags, read_settings

INIT = """example:
  headrace init --out logins --model Qwen/Qwen3-0.6B --tenant acme --nats nats://broker:4222

Seeds that are in the folder stay, so the same command with one more --model or --tenant adds a login. The folder holds the keys
to the deployment: give each part its own two files (NAME.nk, NAME.json) and nothing else."""


def add_init(commands: Any, about: str) -> None:
    """Add `headrace init`."""
    parser = commands.add_parser(
        "init",
        help=about,
        description="Make the logins of a deployment for a nats-server of your own: seeds, contexts, and the accounts with "
        "their permissions for its configuration.",
        epilog=INIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model whose workers get their own login; repeatable",
    )
    parser.add_argument("--tenant", action="append", default=[], metavar="NAME", help="a tenant that stores jobs; repeatable")
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="ID",
        help="an id for one start of a worker of the model, with a login of its own; repeatable",
    )
    parser.add_argument(
        "--jwt", action="store_true", help="accounts and users as JSON web tokens, for a nats-server in operator mode"
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run_init, prog="headrace init")


def add_steward(commands: Any, about: str) -> None:
    """Add `headrace steward`."""
    parser = commands.add_parser(
        "steward",
        help=about,
        description="Make the streams of a deployment, as its operator, and the consumers that its parts ask for. `headrace "
        "up` does this for its own server.",
        allow_abbrev=False,
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run_steward, prog="headrace steward")


def _run_init(parsed: argparse.Namespace) -> int:
    from headrace.commands.init import Wanted, run_init

    settings, folder = read_settings(parsed, "control"), parsed.out.resolve()
    wanted = Wanted(models=parsed.model, tenants=parsed.tenant, workers=parsed.worker)
    return run_init(settings, folder, wanted, jwt=parsed.jwt)


def _run_steward(parsed: argparse.Namespace) -> int:
    from headrace.commands.steward import run_steward

    return run_steward(located_settings(parsed))
