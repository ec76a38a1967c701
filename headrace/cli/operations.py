"""Adds the commands that operate one worker's engine below `headrace worker`."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.commands.groups import add_group
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

HEALTH_EXAMPLES = """examples:
  headrace worker health worker-1
  headrace worker health worker-1 --json --timeout 2

The engine is asked for one token unless it sleeps or is paused. Exit codes: 0 healthy, 1 not, or no answer."""

SLEEP_EXAMPLES = """examples:
  headrace worker sleep worker-1
  headrace worker sleep worker-1 --level 2 --grace 5

Takes nothing new, finishes or hands over its work, and then has the engine free its memory; what was freed is measured. Its
process and its place among the workers stay. `headrace worker wake`, or a router with --wake-on-demand, ends the sleep. On a
GPU vLLM needs --engine-arg enable_sleep_mode=true."""

PAUSE_EXAMPLES = """examples:
  headrace worker pause worker-1
  headrace worker pause worker-1 --grace 30

Without --grace running answers stand still and go on at `headrace worker resume`; their deadlines do not wait."""

PROFILE_EXAMPLES = """examples:
  headrace worker profile start worker-1
  headrace worker profile stop worker-1

vLLM needs --engine-arg 'profiler_config={"profiler": "torch", "torch_profiler_dir": "FOLDER"}', the simulator
--engine-arg profile_dir=FOLDER."""

LEVELS = ("debug", "info", "warning", "error")


def add_operations(actions: Any) -> None:
    """Add `health`, `sleep`, `wake`, `pause`, `resume`, `reset-cache`, `profile` and `log-level`."""
    health = _add(actions, "worker health", _health, "ask a worker, and its engine, whether it can serve", HEALTH_EXAMPLES)
    health.add_argument("--no-canary", action="store_true", help="do not ask the engine for a token")
    health.add_argument("--timeout", type=float, default=10.0, metavar="SECONDS", help="for the engine's answer (default: 10)")
    health.add_argument("--json", action="store_true", help="as JSON")
    sleep = _add(actions, "worker sleep", _sleep, "have a worker finish and free its engine's memory", SLEEP_EXAMPLES)
    sleep.add_argument("--level", type=int, default=1, metavar="N", help="1: weights stay on the host; 2: they are dropped")
    _grace(sleep, "how long its work may take to finish; the rest goes on elsewhere (default: the worker's drain_grace_s)")
    _add(actions, "worker wake", _wake, "end a worker's sleep")
    pause = _add(actions, "worker pause", _pause, "have a worker stand still", PAUSE_EXAMPLES)
    _grace(pause, "finish its answers first, for so long; the rest goes on elsewhere (default: they stand still with it)")
    _add(actions, "worker resume", _resume, "end a worker's pause")
    _add(actions, "worker reset-cache", _reset_cache, "empty the prefix cache of a worker's engine")
    described = "Start the profiler of a worker's engine, or stop it and have it write down what it has seen."
    ways = add_group(
        actions, "worker profile", about="profile a worker's engine", description=described, examples=PROFILE_EXAMPLES
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
