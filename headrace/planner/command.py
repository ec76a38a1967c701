"""The command `headrace planner`, with `replay` and `profile`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
import time
from collections.abc import Coroutine, Iterator
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import msgspec
import structlog

from headrace.base.errors import EXIT_OK, CommandError, SettingsError, StartFailed
from headrace.base.process import stop_signals
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.part_state import PartState
from headrace.chat import served_models
from headrace.commands.control import columns, connected, live_workers, located_settings
from headrace.commands.keys import seconds_of
from headrace.commands.run import run_part, start_part
from headrace.config.build_settings import add_setting_flags, connect_options, planner_settings, subjects
from headrace.config.options import PlannerSettings
from headrace.jetstream.client import connect_patiently
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.planner.actuators import Actuator, Starter, by_command, by_supervisor
from headrace.planner.capacity import Speed
from headrace.planner.forecast import statsforecast_models
from headrace.planner.kubernetes import KubernetesApi, KubernetesScaler
from headrace.planner.learning import LEAST_SAMPLES, RoleProfile, SpeedProfile
from headrace.planner.observe import step_sights
from headrace.planner.process import DesiredPage, PlannerProcess, serve_page
from headrace.planner.replay import Request, WorldSettings, play_fixed, play_planner, read_placements, read_trace
from headrace.tools.argument_types import count, positive
from headrace.tools.bench.load import Target, bodies, run_closed, target
from headrace.up.worker_plan import socket_of

log = structlog.get_logger()

CONNECT_S = 30.0
FRESH_TICKS = 6.0
_LOGINS = ("planner", "operator")  # the best one first, where the server asks for one


def _run(parsed: argparse.Namespace) -> int:
    """Run `headrace planner`. Raises SettingsError."""
    settings = located_settings(parsed, "planner", logins=_LOGINS)
    start_part(settings, {"component": "planner"})
    options = connect_options(settings, name="headrace planner")
    chosen = planner_settings(settings)
    profile = read_profile(chosen.profile)
    statsforecast_models(chosen.forecasters)  # a missing package is reported now
    socket = socket_of(Path(settings["data_dir"]).resolve())
    starter = by_supervisor(str(socket)) if socket.exists() else None
    if chosen.start_command:
        starter = by_command(chosen.start_command)
    api = KubernetesApi.of_this_pod() if chosen.kubernetes else None

    def start() -> Coroutine[Any, Any, int | None]:
        return run_planner(chosen, options, subjects(settings), starter=starter, api=api, profile=profile)

    return run_part(settings, start)


def read_profile(path: str | None) -> dict[str, Speed]:
    """Read measured speeds, role → base_s, prefill_s, decode_s, context_s. Raises SettingsError for a file that has none."""
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Speed]) if path else {}
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"planner.profile: {path} cannot be used: {error}") from error


async def run_planner(
    settings: PlannerSettings,
    connect: ConnectOptions,
    names: Subjects,
    *,
    starter: Starter | None,
    api: KubernetesApi | None = None,
    profile: dict[str, Speed],
) -> None:
    """Plan until SIGTERM or SIGINT. With an `api` Kubernetes starts and stops workers, else `starter` starts them.

    Raises StartFailed, and the ConnectError family if NATS cannot be used."""
    state, stopping = PartState("planner"), asyncio.Event()
    page = DesiredPage(fresh_s=max(30.0, FRESH_TICKS * settings.tick_s))
    try:
        port = serve_page(settings.host, settings.port, page, state)
    except OSError as error:
        raise StartFailed(f"port {settings.port} of {settings.host} cannot be used: {error}") from error
    log.info("planner.listening", host=settings.host, port=port, mode=settings.mode)
    async with await connect_patiently(connect, subjects=names, timeout_s=CONNECT_S) as connection:
        actuator = Actuator(connection, names, starter)
        if api is not None:
            scaler = KubernetesScaler(api, partial(live_workers, connection, names))
            actuator = Actuator(connection, names, scaler.start, scaler.leave)
        process = PlannerProcess(connection, names, settings, page, actuator if settings.mode == "act" else None, profile)
        with stop_signals(stopping.set, stopping.set):
            running = asyncio.create_task(process.run(state), name="planner")
            waiting = asyncio.create_task(stopping.wait(), name="stop")
            try:
                await asyncio.wait({running, waiting}, return_when=asyncio.FIRST_COMPLETED)
            finally:
                waiting.cancel()
                running.cancel()
                ended = await asyncio.gather(running, return_exceptions=True)
            if isinstance(ended[0], Exception):
                raise ended[0]
    log.info("planner.stopped")


# Runs `headrace planner profile`: asks a running deployment at rising loads, and fits what an engine step costs.
#
# What is asked goes to the HTTP API as any client's requests do; the steps are those of the workers' load reports.

ANSWER_S = 120.0  # after the end of a level, for its requests


def _run_profile(parsed: argparse.Namespace) -> int:
    """Measure, and write the profile to a file or standard output. Raises CommandError."""
    settings = located_settings(parsed)
    if not parsed.listen and not parsed.model:
        models = served_models(parsed.url, api_key=parsed.api_key)
        if not models:
            raise CommandError(f"{parsed.url}: no model is served")
        parsed.model = models[0]

    async def measure(messaging: Messaging, names: Subjects) -> dict[str, RoleProfile]:
        return await _measured(messaging, names, parsed)

    found = connected(settings, measure, name="headrace planner profile")
    text = msgspec.json.format(msgspec.json.encode({role: one.speed for role, one in found.items()}), indent=1).decode() + "\n"
    if parsed.out is None:
        sys.stdout.write(text)
    else:
        try:
            parsed.out.write_text(text)
        except OSError as error:
            raise CommandError(f"{parsed.out} cannot be written: {error.strerror or error}") from error
    costs = ["step", "per prompt token", "per sequence", "per 1,000 of context"]
    rows = [["role", "steps", *costs, "median error", "within 20 %"]]
    for role, one in found.items():
        base, prefill, decode, context = msgspec.structs.astuple(one.speed)
        costs = [f"{base * 1e3:.2f} ms", f"{prefill * 1e6:.1f} µs", f"{decode * 1e6:.1f} µs", f"{context * 1e9:.2f} µs"]
        rows.append([role, str(one.steps), *costs, f"{one.error:.1%}", f"{one.near:.0%}"])
    sys.stderr.write(columns(rows))
    for role, one in found.items():
        for lack in one.lacks:
            sys.stderr.write(f"{role}: {lack}; the profile guesses what that costs. Ask with other --streams or --words.\n")
    return EXIT_OK


async def _measured(messaging: Messaging, names: Subjects, wish: argparse.Namespace) -> dict[str, RoleProfile]:
    workers = _chosen(await live_workers(messaging, names), wish.model, wish.fleet)
    profile = SpeedProfile()

    def on_load(message: Message) -> None:
        with contextlib.suppress(WireError):
            report = decode(LoadReport, message.data)
            if (member := workers.get(report.worker)) is not None:
                for step in step_sights(member, [report]):
                    profile.note(member.role, member.worker, step)

    listening = await messaging.subscribe(f"{names.prefix}.load.*.*", on_load)
    try:
        if wish.listen:
            await asyncio.sleep(wish.seconds)
        else:
            await _ask(target(wish.url, wish.model, wish.api_key), wish, profile)
    finally:
        await listening.unsubscribe()
    found = profile.roles()
    if not found:
        counts = profile.counts()
        told = ", ".join(f"{counts.get(role, 0)} of {role}" for role in sorted({one.role for one in workers.values()}))
        raise CommandError(f"too few engine steps were reported: {told}; {LEAST_SAMPLES} are needed. Give more --seconds")
    return found


async def _ask(server: Target, wish: argparse.Namespace, profile: SpeedProfile) -> None:
    def requests(end: float, words: int, seed: int) -> Iterator[bytes]:
        """Return bodies until the time `end` of the monotonic clock, at least one."""
        while True:
            yield bodies(server.model, requests=1, words=words, tokens=wish.tokens, seed=seed)[0]
            seed += 1
            if time.monotonic() >= end:
                return

    for level, (words, streams) in enumerate(product(wish.words, wish.streams)):
        sent = requests(time.monotonic() + wish.seconds, words, level * 1_000_000)
        outcome = await run_closed(server, sent, streams=streams, timeout_s=wish.seconds + ANSWER_S)
        load = f"{streams} streams and prompts of {words} words"
        if outcome.failed:
            raise CommandError(f"{outcome.failed} requests failed with {load}: {outcome.errors[0][:300]}")
        told = ", ".join(f"{steps} {role}" for role, steps in profile.counts().items())
        sys.stderr.write(f"{streams} streams, prompts of {words} words: {outcome.ok} answers; steps so far: {told or 'none'}\n")


def _chosen(members: list[WorkerMember], model: str | None, fleet: str | None) -> dict[str, WorkerMember]:
    """Return the workers to profile, by id. Raises CommandError where they would be of several models or fleets, or none."""
    here = [one for one in members if model in (None, one.model) and fleet in (None, one.fleet)]
    pools = sorted({(one.model, one.fleet) for one in here})
    if not pools:
        raise CommandError(f"no worker serves {model or 'a model'}{f' in fleet {fleet!r}' if fleet is not None else ''}")
    if len(pools) > 1:
        told = ", ".join(f"{name} ({own!r})" if own else name for name, own in pools)
        raise CommandError(f"workers of several models or fleets are here: {told}. Choose with --model and --fleet")
    return {one.worker: one for one in here}


def _run_replay(parsed: argparse.Namespace) -> int:
    """Print what the planner and fixed numbers of workers would have cost. Raises CommandError."""
    settings = located_settings(parsed, "planner", logins=_LOGINS)
    chosen = planner_settings(settings)
    speed = read_profile(chosen.profile).get("aggregated") or Speed()
    world = WorldSettings(speed=speed, start_s=chosen.start_s, tick_s=chosen.tick_s, first=max(1, chosen.least))
    since_s = time.time() - seconds_of(parsed.last, "--last")

    async def ask(messaging: Messaging, names: Subjects) -> dict[str, list[Request]]:
        return await read_placements(messaging, names, since_s=since_s, output=parsed.output_tokens)

    trace = parsed.trace
    past = {trace: read_trace(Path(trace))} if trace else connected(settings, ask, name="headrace planner replay")
    if not any(past.values()):
        raise CommandError(f"no placement was recorded in the last {parsed.last}: routers record them with --record")
    told = []
    for queue, requests in sorted(past.items()):
        planned, reasons = play_planner(requests, chosen, world)
        lines = [planned, *play_fixed(requests, chosen, world)]
        told.append({"pool": queue, "requests": len(requests), "reasons": reasons, "played": msgspec.to_builtins(lines)})
        if not parsed.json:
            rows = [["workers", "within targets", "worker-hours", "most", "starts", "drains"]]
            for who, attained, hours, *counts in map(msgspec.structs.astuple, lines):
                rows.append([who, f"{attained:.2%}", f"{hours:.2f}", *map(str, counts)])
            sys.stdout.write(f"{queue}: {len(requests)} requests in {requests[-1].at / 3600:.2f} h\n{columns(rows)}")
            sys.stdout.write(f"reasons: {', '.join(f'{n} {reason}' for reason, n in sorted(reasons.items()))}\n")
    if parsed.json:
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=1).decode() + "\n")
    return EXIT_OK


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


def add_planner(commands: Any, about: str) -> None:
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
