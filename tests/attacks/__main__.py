"""Tries attacks with the remedy and without it: the tests must pass, and fail.

python -m tests.attacks              # all, on a quiet machine about a quarter of an hour
python -m tests.attacks H1 quotas    # those of some findings
python -m tests.attacks --table      # print a table and run nothing
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

from tests.attacks.attempt import Attempt
from tests.attacks.scratch_tree import ScratchTree
from tests.attacks.table import ALL, table


def try_one(tree: ScratchTree, attempt: Attempt) -> bool:
    """Run the tests of an attempt with and without its remedy. Returns whether both came out as they should."""
    fine = True
    for test in attempt.tests:
        held = tree.run(test)
        with tree.without(attempt.cuts):
            bare = tree.run(test)
        right = held.passed and not bare.passed
        fine &= right
        print(f"{'ok ' if right else 'BAD'} {attempt.finding}: {attempt.tries}\n    {test}")
        print(f"    with the remedy: {'passed' if held.passed else held.why} ({held.took_s:.1f} s)")
        print(f"    without ({attempt.without}): {bare.why or 'passed'} ({bare.took_s:.1f} s)", flush=True)
    return fine


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.attacks", description=__doc__.splitlines()[0])
    parser.add_argument("findings", nargs="*", help="findings, or words of the issue (default: all)")
    parser.add_argument("--table", action="store_true", help="print the table and run nothing")
    parsed = parser.parse_args()
    if parsed.table:
        print(table())
        return 0
    wanted = [attempt for attempt in ALL if not parsed.findings or attempt.finding in parsed.findings]
    with tempfile.TemporaryDirectory(prefix="attacks-") as folder:
        tree = ScratchTree(Path(folder))
        came_out = [try_one(tree, attempt) for attempt in wanted]
        return 0 if all(came_out) else 1


if __name__ == "__main__":
    sys.exit(main())
