"""Runs `headrace replay`: rebuilds the index of the past, and places recorded requests by another policy."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.control import Routed
from headrace.commands.control import connected, live_workers, located_settings
from headrace.commands.groups import add_group
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects, check_token, pool_id
from headrace.router.errors import RouterError
from headrace.router.index.types import TIERS
from headrace.router.placement.settings import POLICIES, SchedulerSettings
from headrace.router.replay import Rebuilt, Rerun, rebuild, rerun

_EXAMPLES = """examples:
  headrace replay index --model Qwen/Qwen3-0.6B                       what every worker holds now, by the events
  headrace replay index --model Qwen/Qwen3-0.6B --at 48211 --json     … and held after message 48211 of the KV stream
  headrace replay index --model sim --block 0x34508fd0a6a5a4f5         who holds this block
  headrace replay placements --model sim --policy least-loaded --since 86400

Reads only. How far back the index goes is up to the snapshots that are kept; placements are kept for two days."""

_READ_TIMEOUT_S = 30.0

Action = Callable[[Connection, Subjects, str, argparse.Namespace], Awaitable[str]]


def add_parser(commands: Any, about: str) -> None:
    actions = add_group(
        commands,
        "replay",
        about=about,
        description="Rebuild the prefix index as it was, or place the requests of the past by another policy.",
        examples=_EXAMPLES,
    )
    index = _add(actions, "index", run_index, "rebuild the prefix index at a message of the KV stream and show it")
    index.add_argument("--at", type=int, default=0, metavar="SEQ", help="stream sequence (default: the last one)")
    index.add_argument("--block", action="append", default=[], metavar="HASH", help="also say who holds this block; repeatable")
    placements = _add(actions, "placements", run_placements, "place recorded requests by another policy and compare")
    placements.add_argument("--policy", default="kv", metavar="|".join((*POLICIES, "MODULE:FUNCTION")), help="default: kv")
    placements.add_argument("--since", type=float, default=86400.0, metavar="SECONDS", help="how far back (default: a day)")
    placements.add_argument("--until", type=float, default=0.0, metavar="SECONDS", help="… up to so long ago (default: now)")
    placements.add_argument("--blocks", type=int, default=0, metavar="N", help="cache of a worker (default: what leases say)")
    placements.add_argument("--seed", type=int, default=0, help="of random choices")
    placements.add_argument("--differences", type=int, default=20, metavar="N", help="how many to show (default: 20)")


async def run_index(connection: Connection, names: Subjects, pool: str, parsed: argparse.Namespace) -> str:
    """Rebuild the index at a stream sequence. Raises CommandError for a sequence or block that cannot be."""
    if parsed.at < 0:
        raise CommandError(f"--at must be a stream sequence, got {parsed.at}")
    wanted = [_block(text) for text in parsed.block]
    built = await rebuild(connection, names, pool, at_seq=parsed.at)
    report = index_report(built, pool, wanted)
    return json.dumps(report, indent=1) + "\n" if parsed.json else index_table(report)


def index_report(built: Rebuilt, pool: str, blocks: Sequence[int]) -> dict[str, Any]:
    """Return the rebuilt index as data, as `--json` prints it."""
    index, workers = built.caches.index, {}
    for worker in sorted(built.reader.sources.workers()):
        epoch, n = built.reader.sources.known(worker) or (-1, -1)
        held = {tier: len(index.blocks(worker, tier)) // 8 for tier in TIERS}
        workers[worker] = {"epoch": epoch, "n": n, "complete": built.reader.sources.complete(worker), "blocks": held}
    return {
        "pool": pool,
        "seq": built.seq,
        "at": built.at or None,
        "from": built.source,
        "replayed": built.replayed,
        "stream": {"first_seq": built.first_seq, "last_seq": built.last_seq},
        "entries": len(index),
        "workers": workers,
        "blocks": {f"{block:#018x}": _holders(built, block) for block in blocks},
    }


def index_table(report: dict[str, Any]) -> str:
    at = datetime.fromtimestamp(report["at"], UTC).isoformat(timespec="milliseconds") if report["at"] else "no event read"
    stream = report["stream"]
    lines = [
        f"pool {report['pool']}, message {report['seq']} ({at}), {report['entries']} blocks",
        f"from {report['from']} and {report['replayed']} events; the stream has {stream['first_seq']} to {stream['last_seq']}",
        "",
        f"{'WORKER':<24} {'EPOCH':>20} {'N':>9} {'DEVICE':>9} {'HOST':>9} {'DISK':>9}",
    ]
    for worker, one in report["workers"].items():
        held = one["blocks"]
        lines.append(
            f"{worker:<24} {one['epoch']:>20} {one['n']:>9} {held['device']:>9} {held['host']:>9} {held['disk']:>9}"
            + ("" if one["complete"] else "  incomplete: events before were missing")
        )
    for block, holders in report["blocks"].items():
        lines.append(f"{block}: " + (", ".join(f"{w} ({tier})" for w, tier in holders.items()) or "nobody"))
    return "\n".join(lines) + "\n"


async def run_placements(connection: Connection, names: Subjects, pool: str, parsed: argparse.Namespace) -> str:
    """Place recorded requests by another policy and compare. Raises CommandError when there is no record."""
    now = time.time()
    records = await recorded(connection, names, pool, since_s=now - parsed.since, until_s=now - parsed.until)
    if not records:
        raise CommandError(f"there is no record of a placement in pool {pool} in that time")
    began_s = records[0].at - records[0].waited_s
    built = await rebuild(connection, names, pool, before_s=began_s)
    held = {
        worker: {tier: built.caches.index.blocks(worker, tier) for tier in TIERS} for worker in built.reader.sources.workers()
    }
    leases = {member.worker: member.blocks for member in await live_workers(connection, names) if member.pool == pool}
    capacity = {worker: parsed.blocks or blocks for worker, blocks in leases.items() if parsed.blocks or blocks}
    if parsed.blocks:
        capacity |= {record.worker: parsed.blocks for record in records}
    settings = SchedulerSettings(policy=parsed.policy)
    result = rerun(records, settings, capacity=capacity, held=held, seed=parsed.seed, differences=parsed.differences)
    warm = sum(1 for worker in result.workers if any(held.get(worker, {}).values()))
    if parsed.json:
        start = {"seq": built.seq, "workers_with_blocks": warm}
        return json.dumps({"pool": pool, "index_at_start": start, **msgspec.to_builtins(result)}, indent=1) + "\n"
    return placements_table(result, pool=pool, began_s=began_s, seq=built.seq, warm=warm)


def placements_table(result: Rerun, *, pool: str, began_s: float, seq: int, warm: int) -> str:
    began = datetime.fromtimestamp(began_s, UTC).isoformat(timespec="seconds")
    lines = [
        f"pool {pool}: {result.recorded.requests} placements since {began}, {result.moved} go elsewhere under {result.policy}",
        f"caches at the start: message {seq}, {warm} of {len(result.workers)} workers with blocks; no timing, no queues",
        "",
        f"{'':<10} {'REQUESTS':>9} {'HIT BLOCKS':>11} {'HIT RATE':>9} {'UNCACHED':>12} {'BALANCE':>8} {'BY TOKENS':>10}",
    ]
    for name, one in (("recorded", result.recorded), (result.policy, result.replayed)):
        lines.append(
            f"{name:<10} {one.requests:>9} {one.hit_blocks:>11} {one.hit_rate:>9.3f} {one.uncached_tokens:>12} "
            f"{one.balance_requests:>8.2f} {one.balance_uncached:>10.2f}"
        )
    lines += [f"refused: {count} {reason}" for reason, count in result.shed.items()]
    if result.differences:
        lines += ["", f"{'REQUEST':<34} {'BLOCKS':>6}  {'RECORDED':<30} {result.policy.upper():<30}"]
    for one_of in result.differences:
        was = f"{one_of.recorded} ({one_of.recorded_hit} hit)"
        lines.append(f"{one_of.id:<34} {one_of.blocks:>6}  {was:<30} {one_of.replayed} ({one_of.replayed_hit} hit)")
    return "\n".join(lines) + "\n"


async def recorded(connection: Connection, names: Subjects, pool: str, *, since_s: float, until_s: float) -> list[Routed]:
    """Return the recorded placements of a time span, oldest first. Undecodable records are left out and counted on stderr."""
    stream, subject = names.stream("ROUTE"), names.route(pool)
    state = await connection.stream_state(stream, subject=subject)
    follow = connection.follow(stream, subject, start_seq=state.first_seq)
    found: list[Routed] = []
    unread = 0
    try:
        while follow.position < state.last_of_subject:
            async with asyncio.timeout(_READ_TIMEOUT_S):
                batch = await follow.next()
            for message in batch.messages:
                try:
                    record = decode(Routed, message.data)
                except WireError:
                    unread += 1
                    continue
                if since_s <= record.at < until_s:
                    found.append(record)
    except TimeoutError:
        raise JetStreamError(f"{stream} could not be read within {_READ_TIMEOUT_S:g} s") from None
    finally:
        await follow.close()
    if unread:
        sys.stderr.write(f"{unread} records cannot be read and are left out\n")
    return sorted(found, key=lambda record: record.at - record.waited_s)


def _add(actions: Any, name: str, action: Action, text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--model", metavar="M", help="served model name")
    which.add_argument("--pool", metavar="POOL", help="pool, as in the subjects")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=lambda parsed: _run(parsed, action), prog=f"headrace replay {name}")
    return parser


def _run(parsed: argparse.Namespace, action: Action) -> int:
    settings = located_settings(parsed)

    async def act(connection: Connection, names: Subjects) -> str:
        return await action(connection, names, _pool(settings, parsed), parsed)

    try:
        sys.stdout.write(connected(settings, act, name="headrace replay"))
    except RouterError as error:
        raise CommandError(str(error)) from error
    return EXIT_OK


def _pool(settings: Settings, parsed: argparse.Namespace) -> str:
    if parsed.pool:
        return check_token(parsed.pool, "pool")
    return pool_id(parsed.model, settings["namespace"])


def _block(text: str) -> int:
    try:
        value = int(text, 0)
    except ValueError:
        value = -1
    if not 0 <= value < 1 << 64:
        raise CommandError(f"--block must be a chain value, decimal or with 0x, got {text!r}")
    return value


def _holders(built: Rebuilt, block: int) -> dict[str, str]:
    found = built.caches.index.match([block])
    return {
        worker: next(tier for tier in TIERS if getattr(overlap, tier))
        for worker, overlap in sorted(found.items())
        if overlap.blocks
    }
