"""The command `headrace top`: parts of a deployment, their load, and the depths of its streams, live on a terminal."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import shutil
import sys
import termios
import time
import tty
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, Literal, Self

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.base.logs import wants_colour
from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.broker.models.card_store import readable_members
from headrace.commands.control import connected, located_settings
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import REQUEST_CLASSES, Subjects

STALE_S = 2.0  # a report that is older is ten reports late
ASKED_AT_ONCE = 500  # reports
STREAMS = ("REQ", "MOVED", "WORK", "PREFILL", "JOB", "DLQ")

State = Literal["serving", "draining", "asleep", "paused", "waking", "no report"]


class WorkerRow(msgspec.Struct, frozen=True, kw_only=True):
    """A worker and its last load report. `tokens_s`: sequences that got a token in its last engine step, per second of it."""

    worker: str
    pool: str
    model: str
    role: str
    state: State
    fleet: str = ""  # of several that serve its model; empty = its operator named none
    running: int = 0
    slots: int = 0
    waiting: int = 0
    kv_used: float | None = None  # share of its KV blocks, 0 to 1; None = not told
    tokens_s: float = 0.0
    step_s: float = 0.0
    tiers: list[int] = []  # blocks that its prefix cache holds: device, host, disk; empty = not told
    report_age_s: float | None = None


class StreamRow(msgspec.Struct, frozen=True, kw_only=True):
    """A stream and what is in it. `messages` None: it could not be read."""

    stream: str
    messages: int | None = None


class PoolRow(msgspec.Struct, frozen=True, kw_only=True):
    """A pool: its routers, and its stored requests by class, those that routers hold included."""

    pool: str
    routers: int = 0
    stored: dict[str, int] = {}


class Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """A deployment at one time (Unix)."""

    at: float
    frontends: int
    pools: tuple[PoolRow, ...]
    workers: tuple[WorkerRow, ...]
    streams: tuple[StreamRow, ...]


async def read_snapshot(messaging: Messaging, names: Subjects) -> Snapshot:
    """Read everything once. Raises a JetStreamError if the parts cannot be listed; what else is missing is shown as missing."""
    entries = await messaging.bucket(names.bucket("members")).entries(">")
    members = sorted(
        readable_members([entry for entry in entries if entry.key.startswith("worker.")]), key=lambda member: member.worker
    )
    routers: dict[str, int] = {}
    for entry in entries:
        kind, _, rest = entry.key.partition(".")
        if kind == "router":
            pool = rest.partition(".")[0]
            routers[pool] = routers.get(pool, 0) + 1
    now = time.time()
    reports = await load_reports(messaging, names, members)
    stored = await stored_requests(messaging, names)
    pools = sorted({member.pool for member in members} | set(routers) | set(stored))
    return Snapshot(
        at=now,
        frontends=sum(entry.key.startswith("ingress.") for entry in entries),
        pools=tuple(PoolRow(pool=pool, routers=routers.get(pool, 0), stored=stored.get(pool, {})) for pool in pools),
        workers=tuple(worker_row(member, reports.get(member.worker), now) for member in members),
        streams=tuple([await _stream(messaging, names, stream) for stream in STREAMS]),
    )


def worker_row(member: WorkerMember, report: LoadReport | None, now: float) -> WorkerRow:
    """Return the row of a worker. `now` is Unix time; clocks of machines may differ by less than `STALE_S`."""
    state: State = "serving"
    if member.sleeping:
        state = "waking" if member.waking else "asleep"
    elif member.paused:
        state = "paused"
    elif member.draining:
        state = "draining"
    elif report is None or now - report.at > STALE_S:
        state = "no report"
    row = WorkerRow(
        worker=member.worker,
        pool=member.pool,
        model=member.model,
        role=member.role,
        state=state,
        fleet=member.fleet,
        slots=member.slots,
    )
    if report is None:
        return row
    return msgspec.structs.replace(
        row,
        running=report.running,
        waiting=report.waiting,
        kv_used=report.blocks_used / report.blocks_total if report.blocks_total else None,
        tokens_s=report.step_decodes / report.step_s if report.running and report.step_s > 0 else 0.0,
        step_s=report.step_s,
        tiers=report.tiers,
        report_age_s=max(0.0, now - report.at),
    )


async def load_reports(messaging: Messaging, names: Subjects, members: Sequence[WorkerMember]) -> dict[str, LoadReport]:
    if not members:
        return {}
    found: dict[str, LoadReport] = {}
    with contextlib.suppress(JetStreamError):  # the stream is in memory, and gone for a moment after a restart of the server
        subjects = [names.load(member.pool, member.worker) for member in members]
        for some in (subjects[i : i + ASKED_AT_ONCE] for i in range(0, len(subjects), ASKED_AT_ONCE)):
            for message in await messaging.last_messages(names.stream("LOAD"), some):
                with contextlib.suppress(WireError):
                    report = decode(LoadReport, message.data)
                    found[report.worker] = report
    return found


async def stored_requests(messaging: Messaging, names: Subjects) -> dict[str, dict[str, int]]:
    """Return the stored requests by pool and class, those that routers hold included."""
    stored: dict[str, dict[str, int]] = {}
    for kind in ("REQ", "MOVED"):
        with contextlib.suppress(JetStreamError):
            for subject, count in (await messaging.subject_counts(names.stream(kind), names.all_of("req"))).items():
                request = names.parse_req(subject)
                classes = stored.setdefault(request.pool, dict.fromkeys(REQUEST_CLASSES, 0))
                classes[request.request_class] += count
    return stored


async def _stream(messaging: Messaging, names: Subjects, stream: str) -> StreamRow:
    try:
        state = await messaging.stream_state(names.stream(stream))
    except JetStreamError:
        return StreamRow(stream=stream)
    return StreamRow(stream=stream, messages=state.messages)


_ENTER = "\x1b[?1049h\x1b[?25l"
_LEAVE = "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _BELOW = "\x1b[H", "\x1b[K", "\x1b[J"


class Screen:
    """The terminal of this process. Keys are read where the standard input is a terminal, too."""

    def __init__(self) -> None:
        self._keys: asyncio.Queue[str] = asyncio.Queue(64)
        self._saved: list[Any] | None = None

    def __enter__(self) -> Self:
        if sys.stdin.isatty():
            self._saved = termios.tcgetattr(sys.stdin)
            tty.setcbreak(sys.stdin)
            asyncio.get_running_loop().add_reader(sys.stdin.fileno(), self._read)
        sys.stdout.write(_ENTER)
        sys.stdout.flush()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        sys.stdout.write(_LEAVE)
        sys.stdout.flush()
        if self._saved is not None:
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            termios.tcsetattr(sys.stdin, termios.TCSADRAIN, self._saved)

    @property
    def size(self) -> tuple[int, int]:
        size = shutil.get_terminal_size()
        return size.columns, size.lines

    def show(self, lines: Sequence[str]) -> None:
        """Replace what is shown, line by line, so that nothing flickers."""
        sys.stdout.write(_HOME + "\r\n".join(line + _END_OF_LINE for line in lines) + _BELOW)
        sys.stdout.flush()

    async def key(self, timeout_s: float) -> str | None:
        """Wait for a key, at most so long."""
        try:
            async with asyncio.timeout(timeout_s):
                return await self._keys.get()
        except TimeoutError:
            return None

    def _read(self) -> None:
        typed = os.read(sys.stdin.fileno(), 64).decode(errors="replace")
        if not typed:  # the terminal is gone
            asyncio.get_running_loop().remove_reader(sys.stdin.fileno())
            typed = "q"
        for key in typed:
            if not self._keys.full():
                self._keys.put_nowait(key)


Order = Literal["load", "kv", "tokens", "name"]
ORDERS: tuple[Order, ...] = ("load", "kv", "tokens", "name")
LEAST_WIDTH = 20
BAR = 5  # characters

_KEYS: dict[Order, Callable[[WorkerRow], tuple[object, ...]]] = {
    "load": lambda row: (-(row.running / row.slots if row.slots else 0.0), -row.waiting, row.worker),
    "kv": lambda row: (-(row.kv_used or 0.0), row.worker),
    "tokens": lambda row: (-row.tokens_s, row.worker),
    "name": lambda row: (row.worker,),
}
_HEADINGS = ("WORKER", "ROLE", "STATE", "RUN", "WAIT", "KV", "TIERS", "TOK/S", "STEP")
_RIGHT = frozenset({"RUN", "WAIT", "TOK/S", "STEP"})
_DROPPED_FIRST = ("TIERS", "STEP", "ROLE", "WAIT", "KV")  # where the terminal is narrow
_COLOURS: dict[State, str] = {"no report": "31", "draining": "33", "asleep": "36", "paused": "33", "waking": "36"}


def draw(
    snapshot: Snapshot, *, width: int, height: int | None, order: Order = "load", colour: bool = False, trouble: str = ""
) -> list[str]:
    """Return at most `height` lines (None: as many as there are) of at most `width` visible characters.

    `trouble`: why this is not the present state. Colour only repeats what words say.
    """
    width = max(width, LEAST_WIDTH)
    lines = [*_summary(snapshot, trouble), ""]
    for pool in snapshot.pools:
        rows = [row for row in snapshot.workers if row.pool == pool.pool]
        lines += [_pool(pool, rows), *_fleets(rows)]
    lines += [_streams(snapshot), ""]
    head = [_cut(line, width) for line in lines]
    if height is not None:
        head = head[: max(1, height - 2)] if len(head) > height - 2 else head
    room = None if height is None else height - len(head)
    return head + _workers(snapshot, width, room, order, colour=colour)


def _summary(snapshot: Snapshot, trouble: str) -> list[str]:
    at = time.strftime("%H:%M:%S", time.localtime(snapshot.at))
    serving = sum(row.state == "serving" for row in snapshot.workers)
    rate = sum(row.tokens_s for row in snapshot.workers)
    running = sum(row.running for row in snapshot.workers)
    slots = sum(row.slots for row in snapshot.workers)
    routers = sum(pool.routers for pool in snapshot.pools)
    title = f"headrace top  {at}  {f'NOT CURRENT: {trouble}' if trouble else 'q quits, s sorts'}"
    parts = f"{_count(snapshot.frontends, 'frontend')}, {_count(routers, 'router')}"
    workers = f"{serving} of {_count(len(snapshot.workers), 'worker')} serving"
    return [title, f"{parts}, {workers}   {running} of {slots} slots   {rate:,.0f} tokens/s"]


def _count(number: int, thing: str) -> str:
    return f"{number} {thing}{'' if number == 1 else 's'}"


def _pool(pool: PoolRow, rows: Sequence[WorkerRow]) -> str:
    model = rows[0].model if rows else "no worker"
    stored = ", ".join(f"{pool.stored[name]} {name}" for name in REQUEST_CLASSES if pool.stored.get(name))
    routed = _count(pool.routers, "router") if pool.routers else "no router"
    return f"pool {pool.pool} ({model}): {_count(len(rows), 'worker')}, {routed}, waiting: {stored or 'none'}"


def _fleets(rows: Sequence[WorkerRow]) -> list[str]:
    names = sorted({row.fleet for row in rows})
    if names in ([], [""]):
        return []
    told = []
    for name in names:
        of = [row for row in rows if row.fleet == name]
        serving = sum(row.state == "serving" for row in of)
        slots = f"{sum(row.running for row in of)}/{sum(row.slots for row in of)}"
        told.append(f"{name or '(none)'} {serving} of {len(of)} serving {slots}")
    return [f"  fleets: {', '.join(told)}"]


def _streams(snapshot: Snapshot) -> str:
    return "stored: " + "  ".join(f"{row.stream} {'?' if row.messages is None else row.messages}" for row in snapshot.streams)


def _workers(snapshot: Snapshot, width: int, room: int | None, order: Order, *, colour: bool) -> list[str]:
    rows = sorted(snapshot.workers, key=_KEYS[order])
    if not rows:
        return [_cut("no worker holds a lease", width)][:room]
    left = 0
    if room is not None and len(rows) + 1 > room:
        shown = max(0, room - 2)
        left, rows = len(rows) - shown, rows[:shown]
    cells = [_HEADINGS, *map(_cells, rows)]
    keep = [i for i, name in enumerate(_HEADINGS) if name != "TIERS" or any(any(row.tiers[1:]) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(_HEADINGS))]
    for name in _DROPPED_FIRST:
        if sum(widths[i] for i in keep) + 2 * (len(keep) - 1) <= width:
            break
        keep = [i for i in keep if _HEADINGS[i] != name]
    spare = width - sum(widths[i] for i in keep[1:]) - 2 * (len(keep) - 1)
    widths[0] = min(widths[0], max(8, spare))
    lines = [_cut(_row(row, keep, widths), width) for row in cells]
    if colour:
        lines = [_tinted(line, _COLOURS.get(row.state, "")) for line, row in zip(lines[1:], rows, strict=True)]
        lines.insert(0, f"\x1b[1m{_cut(_row(_HEADINGS, keep, widths), width)}\x1b[0m")
    if left:
        lines.append(_cut(f"… and {_count(left, 'worker')} more, sorted by {order}", width))
    return lines[:room]


def _cells(row: WorkerRow) -> tuple[str, ...]:
    kv = "-" if row.kv_used is None else f"{_bar(row.kv_used)} {row.kv_used:4.0%}"
    rate, step = (f"{row.tokens_s:,.0f}", f"{row.step_s * 1000:.3g}ms") if row.running else ("-", "-")
    role = "agg" if row.role == "aggregated" else row.role
    tiers = "/".join(map(str, row.tiers)) or "-"
    return (row.worker, role, row.state, f"{row.running}/{row.slots}", str(row.waiting), kv, tiers, rate, step)


def _bar(share: float) -> str:
    full = round(max(0.0, min(1.0, share)) * BAR)
    return "#" * full + "." * (BAR - full)


def _row(cells: Sequence[str], keep: Sequence[int], widths: Sequence[int]) -> str:
    shown = []
    for i in keep:
        cell = _cut(cells[i], widths[i])
        shown.append(cell.rjust(widths[i]) if _HEADINGS[i] in _RIGHT else cell.ljust(widths[i]))
    return "  ".join(shown).rstrip()


def _cut(text: str, width: int) -> str:
    """Return a text of printable characters, at most `width` of them."""
    clean = "".join(char if char.isprintable() else "?" for char in text)
    return clean if len(clean) <= width else clean[: width - 1] + "…"


def _tinted(line: str, code: str) -> str:
    return f"\x1b[{code}m{line}\x1b[0m" if code else line


PIPE_WIDTH = 120  # where nothing tells the width
LEAST_INTERVAL_S = 0.2
ANSWER_S = 5.0  # an answer that takes longer is an error, and the last state stays


def run_top(settings: Settings, *, once: bool, as_json: bool, interval_s: float, order: Order) -> int:
    """Show the deployment until `q` or Ctrl-C, or one time. Raises CommandError."""
    if not LEAST_INTERVAL_S <= interval_s <= 3600:
        raise CommandError(f"--interval must be between {LEAST_INTERVAL_S:g} and 3600 seconds, got {interval_s:g}")
    live = sys.stdout.isatty() and not once and not as_json

    async def ask(messaging: Messaging, names: Subjects) -> None:
        if live:
            await watch(messaging, names, interval_s=interval_s, order=order)
            return
        found = await read_snapshot(messaging, names)
        sys.stdout.write(_json(found) if as_json else "\n".join(_plain(found, order)) + "\n")

    with contextlib.suppress(KeyboardInterrupt):
        connected(settings, ask, name="headrace top")
    return EXIT_OK


def _plain(snapshot: Snapshot, order: Order) -> list[str]:
    width = shutil.get_terminal_size((PIPE_WIDTH, 24)).columns
    return draw(snapshot, width=width, height=None, order=order, colour=wants_colour(sys.stdout))


def _json(snapshot: Snapshot) -> str:
    return json.dumps(msgspec.to_builtins(snapshot), indent=1) + "\n"


async def watch(messaging: Messaging, names: Subjects, *, interval_s: float, order: Order) -> None:
    """Show the state and renew it every `interval_s`. While it cannot be read, the last one stays and says why."""
    loop = asyncio.get_running_loop()
    snapshot = await read_snapshot(messaging, names)
    due_s = loop.time() + interval_s
    trouble = ""
    with Screen() as screen:
        while True:
            width, height = screen.size
            screen.show(
                draw(snapshot, width=width, height=height, order=order, colour=wants_colour(sys.stdout), trouble=trouble)
            )
            match await screen.key(max(0.0, due_s - loop.time())):
                case "q" | "Q" | "\x03":
                    return
                case "s":
                    order = ORDERS[(ORDERS.index(order) + 1) % len(ORDERS)]
            if loop.time() >= due_s:
                due_s = loop.time() + interval_s
                try:
                    async with asyncio.timeout(ANSWER_S):
                        snapshot = await read_snapshot(messaging, names)
                    trouble = ""
                except TimeoutError:
                    trouble = f"no answer within {ANSWER_S:g} s"
                except JetStreamError as error:
                    trouble = str(error)


EXAMPLES = """examples:
  headrace top                            q quits, s sorts by load, KV, tokens/s or name
  headrace top --once
  headrace top --json | jq '.workers[].running'

Tokens/s and step times are those of each engine's last step. NO_COLOR turns colours off; no colour says more than the words."""


def add_top(commands: Any, about: str) -> None:
    parser = commands.add_parser(
        "top",
        help=about,
        description="Show workers, pools, queues and streams of a deployment, live in the terminal. Reads only.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--once", action="store_true", help="print the state once; so it does without a terminal")
    parser.add_argument("--json", action="store_true", help="once, as JSON")
    parser.add_argument("--interval", type=float, default=1.0, metavar="SECONDS", help="time between two looks (default: 1)")
    orders = ("load", "kv", "tokens", "name")
    parser.add_argument("--sort", choices=orders, default="load", help="order of workers (default: load)")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run, prog="headrace top")


def _run(parsed: argparse.Namespace) -> int:

    settings = located_settings(parsed, logins=("console", "operator"))  # it only looks
    return run_top(settings, once=parsed.once, as_json=parsed.json, interval_s=parsed.interval, order=parsed.sort)
