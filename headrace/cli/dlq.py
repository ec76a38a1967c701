"""Adds `headrace dlq` and its actions on dead letters to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.commands.groups import add_group
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

EXAMPLES = """examples:
  headrace dlq ls --nats nats://broker:4222
  headrace dlq show 17
  headrace dlq retry 17 --keep                    once more, as a new request; the answer is printed here
  headrace dlq drop 17 18
  headrace dlq drop --older-than 604800

A letter is named by its number or by the id of its request. A request that crashed its workers may crash as many more when it
is run again."""


def add_dlq(commands: Any, about: str) -> None:
    """Add `headrace dlq` and its actions."""
    actions = add_group(
        commands,
        "dlq",
        about=about,
        description="Dead letters: requests that were taken out of service, and what the server took out of our queues.",
        examples=EXAMPLES,
    )
    _add(actions, "ls", _run_ls, "list all dead letters, oldest first")
    show = _add(actions, "show", _run_show, "show one dead letter, its history and why it is here")
    retry = _add(actions, "retry", _run_retry, "run the request of a dead letter once more and print its answer")
    drop = _add(actions, "drop", _run_drop, "remove dead letters for good")
    for parser in (show, retry):
        parser.add_argument("letter", metavar="LETTER", help="its number, or the id of its request")
    retry.add_argument("--keep", action="store_true", help="keep the dead letter even if its request is answered")
    retry.add_argument(
        "--deadline",
        type=float,
        metavar="SECONDS",
        help="how long it may take (default: as long as the request could at first)",
    )
    drop.add_argument("letters", metavar="LETTER", nargs="*", help="its number, or the id of its request")
    drop.add_argument("--all", action="store_true", dest="everything", help="all of them")
    drop.add_argument("--older-than", type=float, metavar="SECONDS", help="those that are here for longer")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace dlq {name}")
    return parser


def _run_ls(parsed: argparse.Namespace) -> int:
    from headrace.commands.dlq import list_letters

    return list_letters(located_settings(parsed), as_json=parsed.json)


def _run_show(parsed: argparse.Namespace) -> int:
    from headrace.commands.dlq import show_letter

    return show_letter(located_settings(parsed), parsed.letter, as_json=parsed.json)


def _run_retry(parsed: argparse.Namespace) -> int:
    from headrace.commands.dlq_retry import retry_letter

    settings = located_settings(parsed)
    return retry_letter(settings, parsed.letter, keep=parsed.keep, deadline_s=parsed.deadline, as_json=parsed.json)


def _run_drop(parsed: argparse.Namespace) -> int:
    from headrace.commands.dlq import drop_letters

    return drop_letters(
        located_settings(parsed),
        parsed.letters,
        everything=parsed.everything,
        older_than_s=parsed.older_than,
        as_json=parsed.json,
    )
