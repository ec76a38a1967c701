"""The addresses on which processes and all that they have started can be reached."""

from __future__ import annotations

import os
from pathlib import Path

LOOPBACK = {"0100007F"}
"""What `listening` finds where all sockets are on 127.0.0.1."""


def listening(pids: set[int]) -> set[str]:
    """The addresses on which processes listen, or take datagrams, as hexadecimal digits of the kernel's tables."""
    inodes = set()
    for pid in pids:
        for link in Path(f"/proc/{pid}/fd").iterdir():
            try:
                inodes.add(os.readlink(link).removeprefix("socket:[").removesuffix("]"))
            except OSError:
                continue
    found = set()
    for table in ("tcp", "tcp6", "udp", "udp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[9] in inodes and (fields[3] == "0A" or table.startswith("udp")):
                found.add(fields[1].rpartition(":")[0])
    return found


def descendants(pids: set[int]) -> set[int]:
    """These processes and all that came out of them, engines and transfer threads' helpers too."""
    parents = {}
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parents[int(folder.name)] = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:
                continue
    found = set(pids)
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return found
