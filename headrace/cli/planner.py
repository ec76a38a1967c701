"""Adds `headrace planner` to the command line."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from headrace.config.flags import add_setting_flags
from headrace.tools.argument_types import count, positive

PLANNER_EXAMPLES = """examples:
  headrace planner                                   say what it would do, beside a running `headrace up`
  headrace planner --mode act --most 4               start and drain workers of that `up`
  headrace planner --mode act --start-command ./more-workers
  headrace planner --mode act --kubernetes           scale the workers of this pod's namespace
  headrace planner replay --last 7d                  what it would have made of the recorded placements
  headrace planner profile --out speeds.json         measure what engine steps cost, to plan by from the beginning

/desired of its page has the numbers for autoscalers, /metrics the same as headrace_planner_*.
"""

PLANNER_PROFILE_EXAMPLES = """examples:
  headrace planner profile --out speeds.json         then: headrace planner --profile speeds.json
  headrace planner profile http://gateway:8000 --streams 1,8,64 --words 100,2000 --seconds 30
  headrace planner profile --listen --seconds 600    beside the traffic that is there

Ask with the numbers of requests and lengths of prompts that are to be planned for, of one model and fleet at a time."""

_LOGINS = ("planner", "operator")  # the best one first, where the server asks for one


def add_planner(commands: Any, about: str) -> None:
    """Add `planner`, `planner replay` and `planner profile`."""
    parser = commands.add_parser(
        "planner",
        help=about,
        description="Plan how many workers of each role every pool needs, and say so; with --mode act start and drain them.",
        epilog=PLANNER_EXAMPLES,
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
    profile = actions.add_parser(
        "profile",
        help="measure what engine steps cost, as a file for planner.profile",
        description="Ask a running deployment at rising loads, fit what an engine step costs, and print that for --profile.",
        epilog=PLANNER_PROFILE_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = profile.add_argument
    add("url", nargs="?", default="http://127.0.0.1:8000", help="of the server to ask (default: http://127.0.0.1:8000)")
    add("--listen", action="store_true", help="ask nothing: take the steps of what others ask meanwhile")
    add("--model", help="default: the first that is served")
    add("--fleet", help="profile the workers of this fleet")
    add("--streams", type=_counts, default=(1, 4, 16), metavar="N,N", help="requests at a time, by level (default: 1,4,16)")
    add("--words", type=_counts, default=(32, 512), metavar="N,N", help="of the prompts, by level (default: 32,512)")
    add("--tokens", type=count, default=32, metavar="N", help="of each answer (default: 32)")
    add("--seconds", type=positive, default=10.0, metavar="X", help="for each level, or to listen (default: 10)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY", help="default: the variable OPENAI_API_KEY")
    add("--out", type=Path, metavar="FILE", help="write the profile here instead of standard output")
    add_setting_flags(profile, "control")
    profile.set_defaults(run=_run_profile, prog="headrace planner profile")


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(one) for one in text.split(","))


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


def _run_profile(parsed: argparse.Namespace) -> int:
    from headrace.commands.running_deployment import located_settings
    from headrace.planner.profile_command import ProfileWish, run_planner_profile

    wish = ProfileWish(
        url=None if parsed.listen else parsed.url,
        model=parsed.model,
        fleet=parsed.fleet,
        streams=parsed.streams,
        words=parsed.words,
        tokens=parsed.tokens,
        seconds=parsed.seconds,
        key=parsed.api_key,
    )
    return run_planner_profile(located_settings(parsed), wish, out=parsed.out)
