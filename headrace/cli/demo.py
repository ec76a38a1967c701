"""Adds `headrace demo` to the command line."""

from __future__ import annotations

import argparse
from typing import Any


def add_demo(commands: Any, about: str) -> None:
    """Add `headrace demo`."""
    demo = commands.add_parser(
        "demo",
        help=about,
        description="Stream an answer, kill the worker that writes it, and show that another one goes on. Runs two simulated "
        "workers and its own nats-server in a temporary folder, takes about 15 seconds, and leaves nothing behind.",
        epilog="exit codes: 0 every token came once and in order, 1 otherwise",
        allow_abbrev=False,
    )
    demo.add_argument("--speed", type=_speed, default=1.0, metavar="N", help="2 is twice as fast (default: 1)")
    demo.set_defaults(run=_run, prog="headrace demo")


def _speed(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 20:
        raise argparse.ArgumentTypeError(f"{text} is not between 0.1 and 20")
    return value


def _run(parsed: argparse.Namespace) -> int:
    from headrace.demo.run import run_demo

    return run_demo(speed=parsed.speed)
