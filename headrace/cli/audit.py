"""Adds `headrace audit` and its actions on the records of requests to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.commands.groups import add_group
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

EXAMPLES = """examples:
  headrace audit ls --tenant acme --since 24
  headrace audit follow --json                    with their content, where that is recorded
  headrace audit keep --days 90 --mib 2048

Frontends record requests only with --audit metadata or --audit content."""


def add_audit(commands: Any, about: str) -> None:
    """Add `headrace audit` and its actions."""
    actions = add_group(
        commands,
        "audit",
        about=about,
        description="Records of requests, which frontends write that run with --audit metadata or --audit content.",
        examples=EXAMPLES,
    )
    ls = _add(actions, "ls", _run_ls, "list the latest records, oldest first")
    ls.add_argument("--limit", type=int, default=100, metavar="N", help="of them (default: 100)")
    ls.add_argument("--since", type=float, default=0.0, metavar="HOURS", help="only of the last hours")
    follow = _add(actions, "follow", _run_follow, "print records as they are written")
    for parser in (ls, follow):
        parser.add_argument("--tenant", metavar="NAME", help="only of this tenant; _ is that of requests without one")
        parser.add_argument("--json", action="store_true", help="each as a line of JSON, with its content")
    keep = _add(actions, "keep", _run_keep, "say how long records are kept, and how much of them")
    keep.add_argument("--days", type=float, metavar="N", help="for so many days (at the beginning: 30)")
    keep.add_argument("--mib", type=int, metavar="N", help="so many MiB; the oldest make room (at the beginning: 256)")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace audit {name}")
    return parser


def _run_ls(parsed: argparse.Namespace) -> int:
    from headrace.base.errors import CommandError
    from headrace.commands.audit import list_records

    if parsed.limit < 1:
        raise CommandError(f"--limit must be 1 or more, got {parsed.limit}")
    return list_records(
        located_settings(parsed), tenant=parsed.tenant, since_s=parsed.since * 3600, limit=parsed.limit, as_json=parsed.json
    )


def _run_follow(parsed: argparse.Namespace) -> int:
    from headrace.commands.audit import follow_records

    return follow_records(located_settings(parsed), tenant=parsed.tenant, as_json=parsed.json)


def _run_keep(parsed: argparse.Namespace) -> int:
    from headrace.commands.audit import keep_records

    return keep_records(located_settings(parsed), days=parsed.days, mib=parsed.mib)
