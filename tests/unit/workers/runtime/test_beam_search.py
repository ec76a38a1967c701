"""Beam search against a plain search that keeps everything, over random models with a small vocabulary."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages import TokenLogprob
from headrace.workers.runtime.beam_search import BeamSearch

END = 0
VOCABULARY = 7


def model(seed: int, prefix: tuple[int, ...]) -> list[tuple[int, bytes, float]]:
    """The log-probabilities of the next token, best first: a function of the seed and everything before it."""
    drawn = random.Random(repr((seed, prefix)))
    weights = [drawn.random() ** 2 + 1e-3 for _ in range(VOCABULARY)]
    scored = [(token, b"%d" % token, math.log(weight / sum(weights))) for token, weight in enumerate(weights)]
    return sorted(scored, key=lambda entry: -entry[2])


def searched(search: BeamSearch, seed: int) -> list[tuple[list[int], float, int | None]]:
    while not search.done:
        steps = []
        for beam in search.open:
            top = model(seed, tuple(beam.ids))[: search.candidates]
            steps.append(TokenLogprob(top[0][0], b"", top[0][2], top))
        search.advance(steps)
    return [(beam.ids, beam.total, beam.end) for beam in search.best()]


def plain(
    seed: int, *, width: int, prompt: int, most: int, ends: frozenset[int], penalty: float
) -> list[tuple[list[int], float, int | None]]:
    """The same search to its last step, all ended beams kept and ranked at the end."""
    beams: list[tuple[list[int], float]] = [([], 0.0)]
    ended: list[tuple[list[int], float, int | None]] = []
    for _ in range(most):
        longer = []
        for ids, total in beams:
            for token, _, logprob in model(seed, tuple(ids))[: 2 * width]:
                if token in ends:
                    ended.append((ids, total + logprob, token))
                else:
                    longer.append(([*ids, token], total + logprob))
        beams = sorted(longer, key=lambda found: -found[1])[:width]
    found = [*ended, *((ids, total, None) for ids, total in beams)]
    return sorted(found, key=lambda one: -one[1] / (prompt + len(one[0])) ** penalty)[:width]


def make(width: int = 2, most: int = 4, **options: object) -> BeamSearch:
    return BeamSearch(**({"width": width, "prompt_tokens": 5, "max_tokens": most, "end_ids": {END}} | options))  # type: ignore[arg-type]


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 3),
    most=st.integers(1, 9),
    prompt=st.integers(1, 40),
    penalty=st.sampled_from([-2.0, 0.0, 0.5, 1.0, 3.0]),
    ends=st.sampled_from([frozenset[int](), frozenset({END}), frozenset({END, 3})]),
)
def test_ending_early_changes_nothing(
    seed: int, width: int, most: int, prompt: int, penalty: float, ends: frozenset[int]
) -> None:
    search = BeamSearch(width=width, prompt_tokens=prompt, max_tokens=most, end_ids=ends, length_penalty=penalty)
    expected = plain(seed, width=width, prompt=prompt, most=most, ends=ends, penalty=penalty)
    assert searched(search, seed) == expected


def test_it_ends_early_where_no_open_beam_can_win() -> None:
    steps = []
    for seed in range(50):
        search = make(width=1, most=50, length_penalty=0.0)
        searched(search, seed)
        steps.append(search.steps)
    assert max(steps) < 50


def test_one_beam_without_an_end_takes_the_likeliest_token_each_time() -> None:
    ((ids, total, end),) = searched(make(width=1, most=5, end_ids=()), 1)
    greedy: list[int] = []
    for _ in range(5):
        greedy.append(model(1, tuple(greedy))[0][0])
    assert (ids, end) == (greedy, None)
    assert total == pytest.approx(sum(model(1, tuple(greedy[:n]))[0][2] for n in range(5)))


def test_beams_as_many_as_there_are_answers_find_the_likeliest_of_all() -> None:
    best = searched(make(width=VOCABULARY**2, most=3, end_ids=(), length_penalty=1.0), 9)
    totals = {
        ids: sum({token: logprob for token, _, logprob in model(9, ids[:n])}[ids[n]] for n in range(3))
        for ids in itertools.product(range(VOCABULARY), repeat=3)
    }
    assert tuple(best[0][0]) == max(totals, key=totals.__getitem__)


@pytest.mark.parametrize("keep_end", [False, True])
def test_an_end_token_is_scored_but_part_of_the_answer_only_if_it_is_asked_for(keep_end: bool) -> None:
    search = make(width=1, most=3, keep_end=keep_end, alternatives=2)
    search.advance([TokenLogprob(END, b"end", -0.1, [(END, b"end", -0.1), (1, b"one", -3.0)])])
    assert search.done, "no open beam can reach -0.1"
    (beam,) = search.best()
    assert (beam.ids, beam.total, beam.end) == ([END] if keep_end else [], -0.1, END)
    assert [entry.id for entry in beam.logprobs] == beam.ids


def test_log_probabilities_are_those_of_the_beams_own_tokens() -> None:
    search = make(width=2, most=2, end_ids=(), alternatives=1)
    expected = searched(search, 4)
    for beam, (ids, total, _) in zip(search.best(), expected, strict=True):
        assert [entry.id for entry in beam.logprobs] == ids
        assert sum(entry.logprob for entry in beam.logprobs) == pytest.approx(total)
        assert [len(entry.top) for entry in beam.logprobs] == [1, 1]
    assert all(not beam.logprobs for beam in make().best())


def test_a_length_penalty_above_zero_favours_long_answers_and_below_zero_short_ones() -> None:
    def length(penalty: float) -> int:
        found = 0
        for seed in range(30):
            search = BeamSearch(width=2, prompt_tokens=1, max_tokens=8, end_ids={END}, length_penalty=penalty)
            found += sum(len(ids) for ids, _, _ in searched(search, seed))
        return found

    assert length(-2.0) < length(0.0) < length(2.0)
