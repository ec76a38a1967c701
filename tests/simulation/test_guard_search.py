"""The search for a schedule that needs a rule finds it where the table names it, elsewhere, or says that there is none."""

from __future__ import annotations

from itertools import islice

import pytest

from tests.simulation.guard_search import Found, assert_matters, schedules
from tests.simulation.search import Scenario
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import Violation, World
from tests.support.moved_seeds import MOVED_SEED


class Ending:
    """Breaks its promise for the seeds `broken`, unless the rule is in force."""

    in_force = True
    played: list[tuple[str, int]] = []

    def __init__(self, name: str, seed: int, broken: set[int], always: frozenset[int]) -> None:
        self.played.append((name, seed))
        self._breaks = seed in always or (seed in broken and not Ending.in_force)

    def leftovers(self) -> list[str]:
        return []

    def verify(self) -> None:
        if self._breaks:
            raise Violation("broken")


def rule(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ending, "in_force", False)


def world(name: str, broken: set[int], always: frozenset[int] = frozenset()) -> Scenario:
    def build(world: World) -> Ending:
        return Ending(name, world.seed, broken, always)

    return Scenario(name=name, build=build, config=CALM, faults=0)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Ending, "played", [])


def told(into: list[tuple[str, str]]):
    return lambda key, value: into.append((key, value))


def test_the_named_schedule_is_played_first_and_once_more_with_the_rule() -> None:
    said: list[tuple[str, str]] = []
    scenarios = {"other": world("other", {0}), "named": world("named", {7})}
    assert assert_matters(rule, scenarios, "named", 7, report=told(said)) == Found("named", 7, 1)
    assert Ending.played == [("named", 7), ("named", 7)]
    assert said == []
    assert Ending.in_force


def test_a_seed_that_has_moved_is_found_again_and_told() -> None:
    said: list[tuple[str, str]] = []
    scenarios = {"other": world("other", set()), "named": world("named", {40})}
    found = assert_matters(rule, scenarios, "named", 7, report=told(said))
    assert (found.where, found.seed) == ("named", 40)
    assert said == [(MOVED_SEED, f"rule: 'named', 40, after {found.plays} runs")]


def test_it_is_found_in_another_deployment_where_the_named_one_shows_it_no_more() -> None:
    scenarios = {"a": world("a", set()), "named": world("named", set()), "b": world("b", {5})}
    found = assert_matters(rule, scenarios, "named", 7, report=told([]))
    assert (found.where, found.seed) == ("b", 5)


def test_a_rule_that_nothing_misses_is_named_after_a_bounded_number_of_runs() -> None:
    scenarios = {"a": world("a", set()), "named": world("named", set())}
    with pytest.raises(AssertionError, match="nothing misses rule: 30 runs from seed 7 of 'named' on break no promise"):
        assert_matters(rule, scenarios, "named", 7, report=told([]), plays=30)
    assert len(Ending.played) == 30


def test_a_schedule_that_breaks_a_promise_with_the_rule_as_well_is_no_proof() -> None:
    scenarios = {"named": world("named", {7}, frozenset({7}))}
    with pytest.raises(AssertionError, match="broken with rule in force, too"):
        assert_matters(rule, scenarios, "named", 7, report=told([]))


def test_half_of_the_schedules_are_of_the_named_deployment_and_all_others_have_their_turn() -> None:
    played = list(islice(schedules(["a", "named", "b", "c"], "named", 3), 25))
    assert played[0] == ("named", 3)
    assert [seed for name, seed in played if name == "named"] == list(range(3, 16))
    assert {name: [seed for other, seed in played if other == name] for name in "abc"} == {
        "a": [0, 1, 2, 3],
        "b": [0, 1, 2, 3],
        "c": [0, 1, 2, 3],
    }
    assert len(set(played)) == 25
