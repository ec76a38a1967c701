"""Adds the commands that operate one worker's engine below `headrace worker`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.cli import help_texts
from headrace.commands.groups import add_group
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

LEVELS = ("debug", "info", "warning", "error")


def add_operations(actions: Any) -> None:
    """Add `health`, `sleep`, `wake`, `pause`, `resume`, `reset-cache`, `profile` and `log-level`."""
    health = _add(actions, "worker health", _health, "ask a worker, and its engine, whether it can serve", help_texts.HEALTH)
    health.add_argument("--no-canary", action="store_true", help="do not ask the engine for a token")
    health.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for the engine's answer (default: 10)")
    health.add_argument("--json", action="store_true", help="as JSON")
    sleep = _add(actions, "worker sleep", _sleep, "have a worker finish and free its engine's memory", help_texts.SLEEP)
    sleep.add_argument("--level", type=int, default=1, metavar="N", help="1: weights stay on the host; 2: they are dropped")
    _grace(sleep, "how long its work may take to finish; the rest goes on elsewhere (default: the worker's drain_grace_s)")
    _add(actions, "worker wake", _wake, "end a worker's sleep")
    pause = _add(actions, "worker pause", _pause, "have a worker stand still", help_texts.PAUSE)
    _grace(pause, "finish its answers first, for so long; the rest goes on elsewhere (default: they stand still with it)")
    _add(actions, "worker resume", _resume, "end a worker's pause")
    _add(actions, "worker reset-cache", _reset_cache, "empty the prefix cache of a worker's engine")
    described = "Start the profiler of a worker's engine, or stop it and have it write down what it has seen."
    ways = add_group(
        actions, "worker profile", about="profile a worker's engine", description=described, examples=help_texts.PROFILE
    )
    for action in ("start", "stop"):
        _add(ways, f"worker profile {action}", _profile, f"{action} the profiler").set_defaults(action=action)
    level = _add(actions, "worker log-level", _log_level, "change the level from which a worker logs")
    level.add_argument("level", choices=LEVELS, help=", ".join(LEVELS))


def _add(
    actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str, epilog: str | None = None
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name.rpartition(" ")[2],
        help=text,
        description=f"{text[0].upper()}{text[1:]}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_setting_flags(parser, "control")
    parser.add_argument("worker", metavar="ID", help="id or name of the worker")
    parser.set_defaults(run=run, prog=f"headrace {name}")
    return parser


def _grace(parser: argparse.ArgumentParser, text: str) -> None:
    parser.add_argument("--grace", type=float, metavar="SECONDS", help=text)


def _health(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.operate import show_health

    settings = located_settings(parsed)
    return show_health(settings, parsed.worker, canary=not parsed.no_canary, timeout_s=parsed.timeout, as_json=parsed.json)


def _sleep(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.operate import sleep_worker

    return sleep_worker(located_settings(parsed), parsed.worker, level=parsed.level, grace_s=parsed.grace)


def _wake(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.operate import wake_worker

    return wake_worker(located_settings(parsed), parsed.worker)


def _pause(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.operate import pause_worker

    return pause_worker(located_settings(parsed), parsed.worker, grace_s=parsed.grace)


def _resume(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.operate import resume_worker

    return resume_worker(located_settings(parsed), parsed.worker)


def _reset_cache(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.operate import reset_cache

    return reset_cache(located_settings(parsed), parsed.worker)


def _profile(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.operate import profile_worker

    return profile_worker(located_settings(parsed), parsed.worker, parsed.action)


def _log_level(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.operate import set_log_level

    return set_log_level(located_settings(parsed), parsed.worker, parsed.level)
