"""Writes into the guards' tables which seeds show them today, as a run of the tests has told it under "seeds that have moved":

    pytest -m virtual -n 2 --dist loadfile tests/simulation | tee log; python -m tests.simulation.guard_seeds <log

Whoever changes the steps of many processes does so at the end: until then each guard looks for its seed anew in every run.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

MOVED = re.compile(r"^(\w+): ('[^']+'), (\d+), after \d+ runs$")
ENTRY = re.compile(r'^(    "?(\w+)"?: \()"[^"]+", \d+(\),)$', re.MULTILINE)


def moved(lines: Iterable[str]) -> dict[str, tuple[str, int]]:
    """Return the deployment and the seed of each guard that a run names."""
    found = (MOVED.match(line.strip()) for line in lines)
    return {match[1]: (match[2].strip("'"), int(match[3])) for match in found if match}


def rewritten(table: str, seeds: Mapping[str, tuple[str, int]]) -> str:
    """Return the text of a module whose entries have these seeds."""

    def entry(match: re.Match[str]) -> str:
        if match[2] not in seeds:
            return match[0]
        where, seed = seeds[match[2]]
        return f'{match[1]}"{where}", {seed}{match[3]}'

    return ENTRY.sub(entry, table)


def main() -> None:
    seeds = moved(sys.stdin)
    for file in sorted(Path(__file__).parent.glob("*/test_guards.py")):
        file.write_text(rewritten(file.read_text(), seeds))
    print(f"{len(seeds)} guards have the seeds that show them now")


if __name__ == "__main__":
    main()
