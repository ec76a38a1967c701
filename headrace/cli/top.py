"""Adds `headrace top` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

EXAMPLES = """examples:
  headrace top                            q quits, s sorts by load, KV, tokens/s or name
  headrace top --once
  headrace top --json | jq '.workers[].running'

Tokens/s and step times are those of each engine's last step. NO_COLOR turns colours off; no colour says more than the words."""


def add_top(commands: Any, about: str) -> None:
    """Add `top`."""
    parser = commands.add_parser(
        "top",
        help=about,
        description="Show workers, pools, queues and streams of a deployment, live in the terminal. Reads only.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--once", action="store_true", help="print the state once; so it does without a terminal")
    parser.add_argument("--json", action="store_true", help="once, as JSON")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks (default: 1)")
    orders = ("load", "kv", "tokens", "name")
    parser.add_argument("--sort", choices=orders, default="load", help="order of workers (default: load)")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run, prog="headrace top")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.top.run import run_top

    settings = located_settings(parsed, logins=("console", "operator"))  # it only looks
    return run_top(settings, once=parsed.once, as_json=parsed.json, interval_s=parsed.interval, order=parsed.sort)
