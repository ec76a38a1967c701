"""The command `headrace planner`, with `replay` and `profile`."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import re
import sys
import time
from collections.abc import Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
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
from headrace.commands.control import columns, connected, live_workers
from headrace.commands.run import run_part, start_part
from headrace.config.build_settings import add_setting_flags, connect_options, planner_settings, subjects
from headrace.config.options import PlannerSettings
from headrace.config.settings import Settings
from headrace.jetstream.client import connect_patiently
from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.planner.actuators import Actuator, CommandStarter, Starter, SupervisorStarter
from headrace.planner.capacity import Speed
from headrace.planner.forecast import statsforecast_models
from headrace.planner.kubernetes import KubernetesApi, KubernetesScaler
from headrace.planner.learning import LEAST_SAMPLES, RoleProfile, SpeedProfile
from headrace.planner.observe import step_sights
from headrace.planner.process import DesiredPage, PlannerProcess, serve_page
from headrace.planner.replay import Played, Request, WorldSettings, play_fixed, play_planner, read_placements, read_trace
from headrace.tools.argument_types import count, positive
from headrace.tools.bench.load import Outcome, Target, bodies, run_closed, target
from headrace.up.worker_plan import socket_of

log = structlog.get_logger()

CONNECT_S = 30.0
FRESH_TICKS = 6.0


def run_planner_command(settings: Settings) -> int:
    """Run `headrace planner`. Raises SettingsError."""
    start_part(settings, {"component": "planner"})
    options = connect_options(settings, name="headrace planner")
    chosen = planner_settings(settings)
    profile = read_profile(chosen.profile)
    statsforecast_models(chosen.forecasters)  # what is not installed is said now
    socket = socket_of(Path(settings["data_dir"]).resolve())

    api = KubernetesApi.of_this_pod() if chosen.kubernetes else None

    def start() -> Coroutine[Any, Any, int | None]:
        return run_planner(chosen, options, subjects(settings), starter=_starter(chosen, socket), api=api, profile=profile)

    return run_part(settings, start)


def read_profile(path: str | None) -> dict[str, Speed] | None:
    """Read measured speeds, role → base_s, prefill_s, decode_s, context_s. Raises SettingsError for a file that has none."""
    if not path:
        return None
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=dict[str, Speed])
    except (OSError, msgspec.MsgspecError) as error:
        raise SettingsError(f"planner.profile: {path} cannot be used: {error}") from error


def _starter(settings: PlannerSettings, socket: Path) -> Starter | None:
    if settings.start_command:
        return CommandStarter(settings.start_command)
    return SupervisorStarter(str(socket)) if socket.exists() else None


async def run_planner(
    settings: PlannerSettings,
    connect: ConnectOptions,
    names: Subjects,
    *,
    starter: Starter | None,
    api: KubernetesApi | None = None,
    profile: dict[str, Speed] | None = None,
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
        scaler = KubernetesScaler(api, partial(live_workers, connection, names)) if api is not None else None
        actuator = Actuator(connection, names, scaler or starter, scaler) if settings.mode == "act" else None
        process = PlannerProcess(connection, names, settings, page, actuator, profile)
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

ANSWER_S = 120.0  # after the end of a level, for what was asked in it


@dataclass(frozen=True, slots=True)
class ProfileWish:
    """The load to ask for: each number of streams with each length of prompt for `seconds`; without a `url` none."""

    url: str | None
    model: str | None
    fleet: str | None
    streams: tuple[int, ...]
    words: tuple[int, ...]
    tokens: int
    seconds: float
    key: str = ""


def run_planner_profile(settings: Settings, wish: ProfileWish, *, out: Path | None) -> int:
    """Measure, and write the profile to `out` or standard output. Raises CommandError."""
    model = wish.model or (_first_model(wish.url, wish.key) if wish.url else None)

    async def measure(messaging: Messaging, names: Subjects) -> dict[str, RoleProfile]:
        return await _measured(messaging, names, wish, model)

    found = connected(settings, measure, name="headrace planner profile")
    text = msgspec.json.format(msgspec.json.encode({role: one.speed for role, one in found.items()}), indent=1).decode() + "\n"
    if out is None:
        sys.stdout.write(text)
    else:
        try:
            out.write_text(text)
        except OSError as error:
            raise CommandError(f"{out} cannot be written: {error.strerror or error}") from error
    sys.stderr.write(_profile_table(found))
    for role, one in found.items():
        for lack in one.lacks:
            sys.stderr.write(f"{role}: {lack}; the profile guesses what that costs. Ask with other --streams or --words.\n")
    return EXIT_OK


async def _measured(messaging: Messaging, names: Subjects, wish: ProfileWish, model: str | None) -> dict[str, RoleProfile]:
    workers = _chosen(await live_workers(messaging, names), model, wish.fleet)
    profile = SpeedProfile()

    def on_load(message: Message) -> None:
        with contextlib.suppress(WireError):
            report = decode(LoadReport, message.data)
            if (member := workers.get(report.worker)) is not None:
                for step in step_sights(member, [report]):
                    profile.note(member.role, member.worker, step)

    listening = await messaging.subscribe(f"{names.prefix}.load.*.*", on_load)
    try:
        if wish.url is None:
            await asyncio.sleep(wish.seconds)
        else:
            await _ask(target(wish.url, model or "", wish.key), wish, profile)
    finally:
        await listening.unsubscribe()
    found = profile.roles()
    if not found:
        counts = profile.counts()
        told = ", ".join(f"{counts.get(role, 0)} of {role}" for role in sorted({one.role for one in workers.values()}))
        raise CommandError(f"too few engine steps were reported: {told}; {LEAST_SAMPLES} are needed. Give more --seconds")
    return found


async def _ask(server: Target, wish: ProfileWish, profile: SpeedProfile) -> None:
    levels = [(streams, words) for words in wish.words for streams in wish.streams]
    for number, (streams, words) in enumerate(levels):
        end = time.monotonic() + wish.seconds
        outcome = await run_closed(
            server,
            _until(end, server.model, words, wish.tokens, seed=number),
            streams=streams,
            timeout_s=wish.seconds + ANSWER_S,
        )
        _refuse_failures(outcome, streams, words)
        told = ", ".join(f"{count} {role}" for role, count in profile.counts().items())
        sys.stderr.write(f"{streams} streams, prompts of {words} words: {outcome.ok} answers; steps so far: {told or 'none'}\n")


def _until(end: float, model: str, words: int, tokens: int, *, seed: int) -> Iterator[bytes]:
    """Return bodies until the time `end` of the monotonic clock, at least one."""
    number = 0
    while not number or time.monotonic() < end:
        yield bodies(model, requests=1, words=words, tokens=tokens, seed=seed * 1_000_000 + number)[0]
        number += 1


def _refuse_failures(outcome: Outcome, streams: int, words: int) -> None:
    if outcome.failed:
        raise CommandError(
            f"{outcome.failed} requests failed with {streams} streams and prompts of {words} words: {outcome.errors[0][:300]}"
        )


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


def _first_model(url: str, key: str) -> str:
    models = served_models(url, api_key=key)
    if not models:
        raise CommandError(f"{url}: no model is served")
    return models[0]


def _profile_table(found: dict[str, RoleProfile]) -> str:
    rows = [
        ["role", "steps", "step", "per prompt token", "per sequence", "per 1,000 of context", "median error", "within 20 %"]
    ]
    for role, one in found.items():
        speed = one.speed
        rows.append(
            [
                role,
                str(one.steps),
                f"{speed.base_s * 1e3:.2f} ms",
                f"{speed.prefill_s * 1e6:.1f} µs",
                f"{speed.decode_s * 1e6:.1f} µs",
                f"{speed.context_s * 1e9:.2f} µs",
                f"{one.error:.1%}",
                f"{one.near:.0%}",
            ]
        )
    return columns(rows)


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
            sys.stdout.write(f"{queue}: {len(requests)} requests in {requests[-1].at / 3600:.2f} h\n{_replay_table(lines)}")
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


def _replay_table(lines: list[Played]) -> str:
    rows = [["workers", "within targets", "worker-hours", "most", "starts", "drains"]]
    rows += [
        [one.who, f"{one.attained:.2%}", f"{one.worker_hours:.2f}", str(one.most), str(one.starts), str(one.drains)]
        for one in lines
    ]
    return columns(rows)


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
    from headrace.commands.control import located_settings

    return run_planner_command(located_settings(parsed, "planner", logins=_LOGINS))


def _run_replay(parsed: argparse.Namespace) -> int:
    from headrace.commands.control import located_settings

    return run_planner_replay(
        located_settings(parsed, "planner", logins=_LOGINS),
        last=parsed.last,
        trace=parsed.trace,
        output=parsed.output_tokens,
        as_json=parsed.json,
    )


def _run_profile(parsed: argparse.Namespace) -> int:
    from headrace.commands.control import located_settings

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
