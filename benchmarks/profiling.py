"""Running a benchmark of one process: quiet logs, uvloop, and with `--profile` a table of where the time goes."""

from __future__ import annotations

import argparse
import cProfile
import logging
import pstats
from collections.abc import Callable, Coroutine

import structlog
import uvloop


def parse_and_run(
    parser: argparse.ArgumentParser,
    measure: Callable[[argparse.Namespace], Coroutine[None, None, None]],
    *,
    lines: int,
) -> None:
    """`lines` of the profile."""
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    if not args.profile:
        uvloop.run(measure(args))
        return
    profile = cProfile.Profile()
    profile.enable()
    uvloop.run(measure(args))
    profile.disable()
    pstats.Stats(profile).sort_stats("tottime").print_stats(lines)
