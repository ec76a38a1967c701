"""Runs `headrace planner replay`: what the planner would have made of recorded requests, in virtual time."""

from __future__ import annotations

import re
import sys
import time
from pathlib import Path

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.commands.operating.control_client import columns, connected
from headrace.config.build_settings import planner_settings
from headrace.config.settings import Settings
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects
from headrace.planner.command import read_profile
from headrace.planner.replay.counterfactual import Played, play_fixed, play_planner
from headrace.planner.replay.engines import Request
from headrace.planner.replay.recorded_requests import read_placements, read_trace
from headrace.planner.replay.world import WorldSettings
from headrace.planner.speed_curve import Speed

_SPAN = re.compile(r"(\d+(?:\.\d+)?)([smhd])\Z")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


def run_planner_replay(settings: Settings, *, last: str, trace: str | None, output: int, as_json: bool) -> int:
    """Print what the planner and fixed numbers of workers would have cost. Raises CommandError."""
    chosen = planner_settings(settings)
    profile = read_profile(chosen.profile)
    world = WorldSettings(
        speed=(profile or {}).get("aggregated") or Speed(),
        start_s=chosen.start_s,
        tick_s=chosen.tick_s,
        first=max(1, chosen.least),
    )
    since_s = time.time() - span_s(last)

    async def ask(messaging: Messaging, names: Subjects) -> dict[str, list[Request]]:
        return await read_placements(messaging, names, since_s=since_s, output=output)

    past = {trace: read_trace(Path(trace))} if trace else connected(settings, ask, name="headrace planner replay")
    if not any(past.values()):
        raise CommandError(f"no placement was recorded in the last {last}: routers record them with --record")
    told = []
    for queue, requests in sorted(past.items()):
        planned, reasons = play_planner(requests, chosen, world)
        lines = [planned, *play_fixed(requests, chosen, world)]
        told.append({"pool": queue, "requests": len(requests), "reasons": reasons, "played": msgspec.to_builtins(lines)})
        if not as_json:
            sys.stdout.write(f"{queue}: {len(requests)} requests in {requests[-1].at / 3600:.2f} h\n{_table(lines)}")
            sys.stdout.write(f"reasons: {', '.join(f'{n} {reason}' for reason, n in sorted(reasons.items()))}\n")
    if as_json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=1).decode() + "\n")
    return EXIT_OK


def span_s(text: str) -> float:
    """Return the seconds of a span such as 7d, 12h, 30m or 90s. Raises CommandError."""
    match = _SPAN.match(text)
    if match is None:
        raise CommandError(f"--last must be a number and one of s, m, h and d, as in 7d, got {text!r}")
    return float(match[1]) * _SECONDS[match[2]]


def _table(lines: list[Played]) -> str:
    rows = [["workers", "within targets", "worker-hours", "most", "starts", "drains"]]
    rows += [
        [one.who, f"{one.attained:.2%}", f"{one.worker_hours:.2f}", str(one.most), str(one.starts), str(one.drains)]
        for one in lines
    ]
    return columns(rows)
