"""What the prefill side of a hand-over asks of its engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages import Generation, Sampling
from headrace.broker.messages.prefill import PrefillJob
from headrace.workers.engine import Sequence
from headrace.workers.handover.prefill_side import PrefillSide
from tests.support.runtime_bench import INFO

ASKED = Sampling(temperature=0.7, max_tokens=50, min_tokens=3, stop_token_ids=[5], seed=8, logit_bias={1: 2.0})


def submitted(*, emitted: list[int], rank: int | None = None, **info: Any) -> Sequence:
    """The sequence of a job, as the engine gets it."""
    given: list[Sequence] = []

    class Raw:
        def submit_raw(self, sequence: Sequence, on_output: Any) -> None:
            given.append(sequence)

        def abort_raw(self, sequence_id: str) -> None:
            raise AssertionError

    side = PrefillSide(
        None,  # type: ignore[arg-type]
        dataclasses.replace(INFO, handover="h", **info),
        Raw(),
        worker="p",
        caches=(),
    )
    payload = encode(Generation(token_ids=pack_u32([1, 2, 3]), sampling=ASKED, logprobs=2))
    job = PrefillJob(
        job="j",
        id="i",
        attempt=1,
        decode="d",
        deadline=9.0,
        created=1.0,
        tokens=3,
        uncached=3,
        room=7,
        emitted=pack_u32(emitted),
        payload=payload,
        rank=rank,
    )
    side.start(job, payload, lambda done: None)
    (sequence,) = given
    assert sequence.token_ids == [1, 2, 3, *emitted]
    return sequence


def test_a_token_that_is_thrown_away_costs_no_sampling() -> None:
    sequence = submitted(emitted=[])
    sampling = sequence.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed, sampling.stop_token_ids) == (1, 0, None, [])
    assert sequence.logprobs is None


def test_a_token_that_is_the_answers_first_is_sampled_as_asked() -> None:
    sequence = submitted(emitted=[], prefill_samples=True)
    sampling = sequence.sampling
    assert (sampling.max_tokens, sampling.min_tokens, sampling.seed, sampling.stop_token_ids) == (1, 1, 8, [5])
    assert (sampling.temperature, sampling.logit_bias, sequence.logprobs) == (0.7, {1: 2.0}, 2)


def test_the_tokens_that_an_answer_must_have_are_those_still_missing() -> None:
    assert submitted(emitted=[4, 5], prefill_samples=True).sampling.min_tokens == 1
    assert submitted(emitted=[4, 5, 6], prefill_samples=True).sampling.min_tokens == 0


@pytest.mark.parametrize(("ranks", "named", "used"), [(1, None, None), (1, 0, None), (2, None, None), (2, 1, 1), (2, 2, None)])
def test_a_prompt_is_computed_on_the_rank_that_its_job_names_if_the_engine_has_it(
    ranks: int, named: int | None, used: int | None
) -> None:
    assert submitted(emitted=[], ranks=ranks, rank=named).rank == used
