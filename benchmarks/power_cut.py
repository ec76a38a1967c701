"""Counts the acknowledged messages that nats-server loses with its power, by `sync_interval`: the table of docs/reliability.md.

    python -m benchmarks.power_cut [--seconds 18] [--servers 1|3] [--sync 2m --sync always] [--strict]

Each row has servers of its own, whose disks lose what was not synced. With --strict a rename syncs nothing, either.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
from pathlib import Path
from typing import Literal

from tests.faults.support.power_cuts import loss, powered
from tests.support.unsynced_disk import missing

SYNCS = {1: ("2m", "10s", "1s", "always"), 3: ("2m", "10s", "always")}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.power_cut", allow_abbrev=False)
    parser.add_argument("--seconds", type=float, default=18.0, help="of load before the cut")
    parser.add_argument("--servers", type=int, choices=(1, 3), action="append")
    parser.add_argument("--sync", action="append", metavar="INTERVAL")
    parser.add_argument("--strict", action="store_true")
    parsed = parser.parse_args()
    if lacks := missing():
        raise SystemExit(lacks)
    print("| servers | sync_interval | acknowledged | still due | lost |\n|---|---|---|---|---|", flush=True)
    for servers in parsed.servers or (1, 3):
        for sync in parsed.sync or SYNCS[servers]:
            print(asyncio.run(row(servers, sync, parsed.seconds, parsed.strict)), flush=True)


async def row(servers: Literal[1, 3], sync: str, seconds: float, strict: bool) -> str:
    with tempfile.TemporaryDirectory() as folder:
        async with powered(Path(folder), sync, servers=servers, strict=strict) as power:
            found = await loss(power, seconds=seconds)
    share = f" ({found.lost / found.due:.1%})" if found.lost else ""
    note = f": {found.note}" if found.note else ""
    return f"| {servers} | {sync} | {found.acknowledged:,} | {found.due:,} | {found.lost:,}{share}{note} |"


if __name__ == "__main__":
    main()
