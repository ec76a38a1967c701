"""Runs `headrace planner profile`: asks a running deployment at rising loads, and fits what an engine step costs.

What is asked goes to the HTTP API as any client's requests do; the steps are those of the workers' load reports.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages import LoadReport, WorkerMember
from headrace.chat.streamed_answer import served_models
from headrace.commands.operating.control import live_workers
from headrace.commands.operating.control_client import columns, connected
from headrace.config.settings import Settings
from headrace.jetstream.ports import Message, Messaging
from headrace.jetstream.subjects import Subjects
from headrace.planner.deployment_watch import step_sights
from headrace.planner.speed_curve import LEAST_SAMPLES
from headrace.planner.speed_profile import RoleProfile, SpeedProfile
from headrace.tools.serve_bench.connection import Outcome
from headrace.tools.serve_bench.load import Target, bodies, run_closed, target

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
    sys.stderr.write(_table(found))
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
        counts = ", ".join(f"{profile.count(role)} of {role}" for role in sorted({one.role for one in workers.values()}))
        raise CommandError(f"too few engine steps were reported: {counts}; {LEAST_SAMPLES} are needed. Give more --seconds")
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
        told = ", ".join(f"{profile.count(role)} {role}" for role in ("aggregated", "prefill", "decode") if profile.count(role))
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


def _table(found: dict[str, RoleProfile]) -> str:
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
