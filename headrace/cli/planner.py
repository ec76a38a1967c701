"""Adds `headrace planner` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli import help_texts
from headrace.config.flags import add_setting_flags

_LOGINS = ("planner", "operator")  # the best one first, where the server asks for one


def add_planner(commands: Any, about: str) -> None:
    """Add `planner` and `planner replay`."""
    parser = commands.add_parser(
        "planner",
        help=about,
        description="Plan how many workers of each role every pool needs, and say so; with --mode act start and drain them.",
        epilog=help_texts.PLANNER,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_setting_flags(parser, "planner")
    parser.set_defaults(run=_run, prog="headrace planner")
    actions = parser.add_subparsers(metavar="", title="other planner commands")
    replay = actions.add_parser(
        "replay",
        help="tell what the planner would have made of recorded requests, in virtual time",
        description="Play recorded requests again with the planner and with fixed numbers of workers, in virtual time.",
        allow_abbrev=False,
    )
    replay.add_argument("--last", default="7d", metavar="SPAN", help="of the records, as 90s, 30m, 12h or 7d (default: 7d)")
    replay.add_argument("--trace", metavar="FILE", help="a CSV file instead: TIMESTAMP, ContextTokens, GeneratedTokens")
    replay.add_argument(
        "--output-tokens", type=int, default=256, metavar="N", help="length of answers, which no record has (default: 256)"
    )
    replay.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(replay, "planner")
    replay.set_defaults(run=_run_replay, prog="headrace planner replay")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.commands.running_deployment import located_settings
    from headrace.planner.command import run_planner_command

    return run_planner_command(located_settings(parsed, "planner", logins=_LOGINS))


def _run_replay(parsed: argparse.Namespace) -> int:
    from headrace.commands.running_deployment import located_settings
    from headrace.planner.replay_command import run_planner_replay

    return run_planner_replay(
        located_settings(parsed, "planner", logins=_LOGINS),
        last=parsed.last,
        trace=parsed.trace,
        output=parsed.output_tokens,
        as_json=parsed.json,
    )
