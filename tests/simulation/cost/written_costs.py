"""The calls of a request that are written down, and how those counted now compare with them."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping
from pathlib import Path

from tests.simulation.cost.deployment import Cost, chat

FILE = Path(__file__).with_name("calls_per_request.json")
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"  # another one counts otherwise
REQUESTS, TOKENS = 64, 16
GROWTH = 0.03  # of the calls of a process; two runs do not differ by one
NAMED = 5  # folders in a message
ACCEPT = "make call-counts"

Calls = dict[str, dict[str, float]]  # by process and folder


def count() -> Calls:
    """Count the calls per request of each process by folder."""
    found: Calls = {}
    for name, modules in Cost().calls([chat(number, TOKENS) for number in range(REQUESTS)]).items():
        folders: Counter[str] = Counter()
        for module, calls in modules.items():
            folders[str(Path(module).parent)] += calls
        found[name] = {folder: round(calls / REQUESTS, 1) for folder, calls in sorted(folders.items())}
    return found


def written() -> Calls | None:
    """Return the figures for this Python, or None."""
    found: dict[str, Calls] = json.loads(FILE.read_text())
    return found.get(PYTHON)


def write(calls: Calls) -> None:
    """Make these the figures for this Python."""
    found = json.loads(FILE.read_text()) if FILE.exists() else {}
    FILE.write_text(json.dumps(found | {PYTHON: calls}, indent=1, sort_keys=True) + "\n")


def growth(before: Calls, now: Calls) -> list[str]:
    """Describe each process whose requests cost more than before, with the folders that grew most."""
    return [text for name in now if (text := _growth(name, before.get(name, {}), now[name]))]


def _growth(name: str, before: Mapping[str, float], now: Mapping[str, float]) -> str:
    was, is_now = sum(before.values()), sum(now.values())
    if is_now <= was * (1 + GROWTH):
        return ""
    more = {folder: calls - before.get(folder, 0.0) for folder, calls in now.items()}
    most = sorted(more, key=lambda folder: -more[folder])[:NAMED]
    return (
        f"a request costs the {name} {is_now:,.0f} calls, {was:,.0f} are written down (+{is_now / was - 1 if was else 1:.1%}). "
        f"Most of it: {', '.join(f'{folder}/ {more[folder]:+.1f}' for folder in most if more[folder] > 0)}. "
        f"If that is worth it, write the new figures down with `{ACCEPT}` in the same commit, and say why"
    )
