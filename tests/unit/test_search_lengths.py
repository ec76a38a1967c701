"""`make test-fast` searches as `make test` does, with fewer examples."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

from tests.support import examples


def item(**attributes: Any) -> Any:
    """What pytest has collected, as far as is looked at."""
    return SimpleNamespace(**attributes)


def test_a_search_tries_a_fifth_of_the_examples_but_not_too_few() -> None:
    tried = {"many": 0, "few": 0}

    @settings(max_examples=60, database=None)
    @given(st.integers())
    def many(value: int) -> None:
        tried["many"] += 1

    @settings(max_examples=3, database=None)
    @given(st.integers())
    def few(value: int) -> None:
        tried["few"] += 1

    # twice: with two values of a parameter the one function is two tests
    examples.shorten([item(obj=many), item(obj=few), item(obj=many), item(obj=item), item()])
    many()
    few()
    assert tried == {"many": 12, "few": 3}


def test_a_search_of_steps_too() -> None:
    runs = 0

    class Machine(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            nonlocal runs
            runs += 1

        @rule()
        def step(self) -> None:
            pass

    Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=2, database=None)
    examples.shorten([item(cls=Machine.TestCase, obj=None)])
    run_state_machine_as_test(Machine, settings=Machine.TestCase.settings)
    assert 0 < runs <= 20
