"""Looks for a schedule that breaks a promise while a rule is out of force.

A rule's table names a deployment and a seed that show it: a saving of time. Seeds move whenever the code takes other steps, so
the search goes on from there, over a bounded range of the schedules of that deployment and of all others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import count, islice
from typing import Any

import pytest

from tests.simulation.search import Scenario, explain, play
from tests.support.moved_seeds import MOVED_SEED

PLAYS = 600  # of one search. A run takes 0.02 to 0.3 s
Report = Callable[[str, Any], None]  # pytest's `record_property`


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule that breaks a promise, and the runs it took to find it."""

    where: str
    seed: int
    plays: int


def schedules(names: list[str], where: str, first: int) -> Iterator[tuple[str, int]]:
    """Yield the named schedule, then without end by turns one of the same deployment and one of the next other one."""
    yield where, first
    others = [name for name in names if name != where]
    for number in count():
        yield where, first + 1 + number
        if others:
            yield others[number % len(others)], number // len(others)


def find_broken(scenarios: Mapping[str, Scenario], where: str, first: int, *, plays: int = PLAYS) -> Found | None:
    """Play until a promise is broken, `plays` times at most."""
    for number, (name, seed) in enumerate(islice(schedules(list(scenarios), where, first), plays), 1):
        if play(scenarios[name], seed).error is not None:
            return Found(name, seed, number)
    return None


def assert_matters(
    rule: Callable[[pytest.MonkeyPatch], None],
    scenarios: Mapping[str, Scenario],
    where: str,
    first: int,
    *,
    report: Report,
    plays: int = PLAYS,
) -> Found:
    """Search with the rule out of force, and show that with it the very schedule that was found breaks nothing.

    Raises AssertionError if no schedule needs the rule. `report` is told of a schedule other than the named one.
    """
    with pytest.MonkeyPatch.context() as patch:
        rule(patch)
        found = find_broken(scenarios, where, first, plays=plays)
    assert found is not None, f"nothing misses {rule.__name__}: {plays} runs from seed {first} of {where!r} on break no promise"
    held = play(scenarios[found.where], found.seed)
    assert held.error is None, f"broken with {rule.__name__} in force, too\n{explain(held)}"
    if found.plays > 1:
        report(MOVED_SEED, f"{rule.__name__}: {found.where!r}, {found.seed}, after {found.plays} runs")
    return found
