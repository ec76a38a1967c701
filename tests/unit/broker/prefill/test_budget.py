"""How many jobs a prefill worker asks for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.prefill.budget import MOST_CREDIT, TokenBudget


def test_tokens_count_and_not_jobs() -> None:
    budget = TokenBudget(1000)
    for n in range(9):
        budget.reserve(f"short-{n}", 100)
    assert budget.credit == 1
    budget.reserve("long", 5000)
    assert budget.credit == 0
    budget.release("long")
    assert budget.credit == 1


def test_a_prompt_larger_than_the_budget_is_asked_for_while_there_is_any_room() -> None:
    budget = TokenBudget(10)
    budget.reserve("huge", 100_000)
    assert budget.credit == 0
    budget.release("huge")
    assert budget.credit == 1


def test_many_are_asked_for_at_once_when_recent_ones_were_small() -> None:
    budget = TokenBudget(1000)
    for n in range(20):
        budget.reserve(str(n), 10)
        budget.release(str(n))
    assert budget.credit == MOST_CREDIT


def test_a_job_that_comes_twice_counts_once() -> None:
    budget = TokenBudget(100)
    budget.reserve("a", 60)
    budget.reserve("a", 60)
    assert budget.used == 60
    budget.release("a")
    budget.release("a")
    assert budget.used == 0


def test_a_budget_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="got 0"):
        TokenBudget(0)


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 3000), st.booleans())), st.integers(1, 2000))
def test_what_is_used_is_what_is_held(steps: list[tuple[str, int, bool]], limit: int) -> None:
    budget = TokenBudget(limit)
    held: dict[str, int] = {}
    for job, tokens, comes in steps:
        if comes:
            budget.reserve(job, tokens)
            held[job] = max(tokens, 1)
        else:
            budget.release(job)
            held.pop(job, None)
        assert budget.used == sum(held.values())
        assert (budget.credit == 0) == (budget.used >= limit)
        assert budget.credit <= MOST_CREDIT
