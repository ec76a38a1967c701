"""What the prefill side of a hand-over asks of its engine."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages import Generation, Sampling, Spill
from headrace.broker.messages.prefill import PrefillJob
from headrace.workers.engine import Sequence
from headrace.workers.handover.prefill_side import PrefillSide
from headrace.workers.runtime.media_embeddings import MediaOrigin
from tests.support.runtime_bench import INFO

ASKED = Sampling(temperature=0.7, max_tokens=50, min_tokens=3, stop_token_ids=[5], seed=8, logit_bias={1: 2.0})


IMAGE = {"kind": "image", "digest": 1, "start": 0, "length": 1, "data": b"cat"}


def submitted(*, emitted: list[int], rank: int | None = None, **info: Any) -> Sequence:
    """The sequence of a job, as the engine gets it."""
    return given(emitted=emitted, rank=rank, **info)[0]


def given(
    *, emitted: list[int], rank: int | None = None, shown: bool = False, spill: Spill | None = None, **info: Any
) -> tuple[Sequence, MediaOrigin | None]:
    """The sequence of a job, as the engine gets it, and where its media come from."""
    taken: list[tuple[Sequence, MediaOrigin | None]] = []

    class Raw:
        def submit_raw(self, sequence: Sequence, on_output: Any, origin: MediaOrigin | None = None) -> None:
            taken.append((sequence, origin))

        def abort_raw(self, sequence_id: str) -> None:
            raise AssertionError

    side = PrefillSide(
        None,  # type: ignore[arg-type]
        dataclasses.replace(INFO, handover="h", **info),
        Raw(),
        worker="p",
        caches=(),
    )
    media = [IMAGE] if shown else []
    payload = encode(Generation(token_ids=pack_u32([1, 2, 3]), sampling=ASKED, logprobs=2, media=media))
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
        payload=b"" if spill is not None else payload,
        spill=spill,
        rank=rank,
    )
    side.start(job, payload, lambda done: None)
    ((sequence, origin),) = taken
    assert sequence.token_ids == [1, 2, 3, *emitted]
    return sequence, origin


@pytest.mark.parametrize("spill", [None, Spill(object="large", size=4, digest="d")], ids=["in the job", "in the store"])
def test_media_of_a_job_come_with_the_request_that_an_encode_worker_is_told_of(spill: Spill | None) -> None:
    sequence, origin = given(emitted=[], shown=True, spill=spill)
    assert list(sequence.media) == [IMAGE]
    assert origin == MediaOrigin("i", spill)


def test_a_text_needs_no_encode_worker() -> None:
    assert given(emitted=[])[1] is None


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
