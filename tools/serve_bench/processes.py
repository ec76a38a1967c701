"""CPU seconds and memory of the server's processes, read from /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

TICK_S = 1 / os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True)
class Usage:
    """CPU seconds so far and resident bytes now."""

    cpu_s: float
    rss: int


def usage(pid: int) -> Usage:
    """Raises FileNotFoundError when the process is gone."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1].split()
    rss = int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * PAGE
    return Usage((int(fields[11]) + int(fields[12])) * TICK_S, rss)


def processes_of(data_dir: Path, parent: int) -> dict[str, int]:
    """Return the process ids of the parts of a running `headrace up`, by a short name. Several frontends are numbered."""
    parts: dict[str, int] = {}
    frontends: list[int] = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            group = (entry / "stat").read_text().rsplit(") ", 1)[1].split()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(group[1]) != parent and int(entry.name) != parent:
            continue
        if "nats-server" in command:
            parts["nats-server"] = int(entry.name)
        elif " frontend" in command:
            frontends.append(int(entry.name))
        elif " router" in command:
            parts[f"router-{sum(name.startswith('router') for name in parts) + 1}"] = int(entry.name)
        elif " worker" in command:
            parts[f"worker-{sum(name.startswith('worker') for name in parts) + 1}"] = int(entry.name)
    if len(frontends) == 1:
        return parts | {"frontend": frontends[0]}
    return parts | {f"frontend-{number}": pid for number, pid in enumerate(sorted(frontends), 1)}
