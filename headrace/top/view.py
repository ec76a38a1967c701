"""Draws a deployment's state as lines of text that fit a terminal: a summary, its pools and streams, and a table of workers."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Literal

from headrace.jetstream.subjects import REQUEST_CLASSES
from headrace.top.facts import PoolRow, Snapshot, State, WorkerRow

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
    """Return a line on the fleets of a pool, none where no worker is in one."""
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
