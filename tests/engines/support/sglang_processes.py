"""Finds the processes of an SGLang engine."""

from __future__ import annotations

from pathlib import Path

from tests.engine_contract.life import descendants


def scheduler_of(worker: int) -> int:
    """The process of SGLang's in which a worker's model computes."""
    found = [pid for pid in descendants(worker) if b"scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(found) == 1, found
    return found[0]
