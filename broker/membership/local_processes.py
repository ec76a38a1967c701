"""Tells whether a process of this machine is gone, which is a fact and no suspicion.

Process ids mean something only to those who share them, so a worker announces with its lease where its id is valid.
"""

from __future__ import annotations

import os
from pathlib import Path


def machine_id() -> str:
    """Return the name of this boot of the machine and of the namespace of process ids; empty if they are not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, UnicodeDecodeError):
        return ""


def process_gone(pid: int) -> bool:
    """Return True if there is no process of this id, or one that has ended and waits to be reaped.

    False if that is not known, and while another process has got the same id.
    """
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    try:
        after_name = Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()
    except OSError:
        return False
    return bool(after_name) and after_name[0] in (b"Z", b"X")
