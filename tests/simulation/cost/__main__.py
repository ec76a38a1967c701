"""Writes down what a request costs now: `python -m tests.simulation.cost`."""

from __future__ import annotations

from tests.simulation.cost.written_costs import FILE, count, write

if __name__ == "__main__":
    calls = count()
    write(calls)
    print({name: round(sum(folders.values())) for name, folders in calls.items()}, "calls per request, in", FILE.name)
