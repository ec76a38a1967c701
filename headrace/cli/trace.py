"""Adds `headrace trace` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.cli import help_texts
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags


def add_trace(commands: Any, about: str) -> None:
    """Add `trace`."""
    parser = commands.add_parser(
        "trace",
        help=about,
        description="Tell what happened to a request: its waits, placements and moves, its prefill and its end. Reads only.",
        epilog=help_texts.TRACE,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("request", metavar="ID", help="id of the answer or request, or the client's x-request-id")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run, prog="headrace trace")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.commands.trace import trace_request

    return trace_request(located_settings(parsed), parsed.request, as_json=parsed.json)
