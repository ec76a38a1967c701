"""Adds `headrace trace` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

EXAMPLES = """examples:
  headrace trace chatcmpl-5f0c2a          the id of an answer, or of the request in the log
  headrace trace my-request-7 --json      what the client sent as x-request-id

Frontends remember their open requests and the last 4,096 that ended, routers why they placed one. Of older requests, and
after a restart of the frontend, the stored records of placements are shown (two days)."""


def add_trace(commands: Any, about: str) -> None:
    """Add `trace`."""
    parser = commands.add_parser(
        "trace",
        help=about,
        description="Tell what happened to a request: its waits, placements and moves, its prefill and its end. Reads only.",
        epilog=EXAMPLES,
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
