"""What the prefill side of a hand-over asks of its engine."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages.prefill import PrefillDone, PrefillJob
from headrace.broker.messages.requests import Generation, Sampling, Spill
from headrace.workers.engine import Capabilities, DisaggStyle, Fault, Handover, Output, Sequence
from headrace.workers.runtime import prefill_side
from headrace.workers.runtime.prefill_side import PrefillSide, PrefixLender
from headrace.workers.runtime.sequences import MediaOrigin
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
        Raw(),  # type: ignore[arg-type]
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


PROMPT = list(range(300))
INFORMED = dataclasses.replace(INFO, handover="h", block_size=32, lends=True)
PARAMS = {"blocks": [1, 2]}


class Raw:
    """An engine's side of raw sequences: `answer` makes the last output of each."""

    def __init__(self, answer: Callable[[Sequence], Output | None]) -> None:
        self.answer = answer
        self.submitted: list[Sequence] = []
        self.aborted: list[str] = []

    def submit_raw(self, sequence: Sequence, on_output: Callable[[Output], None], origin: object = None) -> None:
        self.submitted.append(sequence)
        output = self.answer(sequence)
        if output is not None:
            on_output(output)

    def abort_raw(self, sequence_id: str) -> None:
        self.aborted.append(sequence_id)


def finished(sequence: Sequence) -> Output:
    return Output(sequence.id, [1], finish="length", cached_tokens=0, handover=PARAMS)


def failed(sequence: Sequence) -> Output:
    return Output(sequence.id, [], fault=Fault("transfer_failed", "no", True))


def choice(uncached: int, media: Any = ()) -> Any:
    def sequence(handover: Handover) -> Sequence:
        asked = Sampling(temperature=0.7, max_tokens=50, min_tokens=3, seed=8)
        return Sequence(
            id="c", token_ids=PROMPT, prompt_tokens=300, sampling=asked, logprobs=2, cache_salt="s", handover=handover
        )

    return SimpleNamespace(
        id="c", tokens=300, uncached=uncached, generation=SimpleNamespace(media=media), sequence=sequence,
        run=SimpleNamespace(id="r"),
    )  # fmt: skip


async def test_the_whole_blocks_that_are_cached_are_lent_with_a_token_more() -> None:
    raw = Raw(finished)
    lender = PrefixLender(raw, INFORMED)
    assert await lender.lend(choice(uncached=100)) == PARAMS
    (asked,) = raw.submitted
    assert asked.token_ids == PROMPT[: 6 * 32 + 1]
    assert asked.handover == Handover(kind="lend")
    assert (asked.sampling.max_tokens, asked.sampling.min_tokens, asked.logprobs, asked.cache_salt) == (1, 0, None, "s")
    assert asked.id != "c"
    lender.release(choice(uncached=100))
    assert raw.aborted == [asked.id]


@pytest.mark.parametrize(
    ("given", "info"),
    [
        (choice(uncached=100), dataclasses.replace(INFORMED, lends=False)),
        (choice(uncached=300 - 63), INFORMED),
        (choice(uncached=100, media=[{"kind": "image"}]), INFORMED),
    ],
    ids=["an engine that lends nothing", "too little", "media"],
)
async def test_nothing_is_lent(given: Any, info: Any) -> None:
    raw = Raw(finished)
    assert await PrefixLender(raw, info).lend(given) is None
    assert not raw.submitted


async def test_an_engine_that_does_not_lend_in_time_costs_that_time_only(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_side, "WITHIN_S", 0.01)
    raw = Raw(lambda sequence: None)
    assert await PrefixLender(raw, INFORMED).lend(choice(uncached=100)) is None
    assert raw.aborted == [raw.submitted[0].id]


async def test_a_request_that_ends_meanwhile_takes_back_what_it_lends() -> None:
    raw = Raw(lambda sequence: None)
    lending = asyncio.create_task(PrefixLender(raw, INFORMED).lend(choice(uncached=100)))
    await asyncio.sleep(0)
    lending.cancel()
    await asyncio.wait([lending])
    assert lending.cancelled()
    assert raw.aborted == [raw.submitted[0].id]


async def test_an_engine_that_refuses_to_lend_lends_nothing() -> None:
    assert await PrefixLender(Raw(failed), INFORMED).lend(choice(uncached=100)) is None


# -- the prefill side ----------------------------------------------------------------------------------------


def prefill(raw: Raw) -> PrefillDone:
    """Run a job with a lent prefix."""
    capable = SimpleNamespace(capabilities=Capabilities(disagg=DisaggStyle.PARAMS))
    side = PrefillSide(capable, INFORMED, raw, worker="p", caches=())  # type: ignore[arg-type]
    payload = encode(Generation(token_ids=pack_u32(PROMPT), sampling=Sampling(max_tokens=9)))
    job = PrefillJob(
        job="j", id="i", attempt=1, decode="d", deadline=9.0, created=1.0, tokens=300, uncached=300, payload=payload,
        prefix=PARAMS,
    )  # fmt: skip
    done: list[PrefillDone] = []
    side.start(job, payload, done.append)
    return done[0]


def test_the_engine_gets_the_prefix_and_what_it_read_is_not_counted_as_computed() -> None:
    def read(sequence: Sequence) -> Output:
        return Output(sequence.id, [1], finish="length", cached_tokens=32, handover={"o": 1}, extra={"remote_tokens": 161})

    raw = Raw(read)
    done = prefill(raw)
    assert raw.submitted[0].handover == Handover(kind="prefill", params=PARAMS)
    assert (done.cached, done.read, done.computed) == (32, 161, 300 - 32 - 161)


def test_a_prefix_that_cannot_be_read_is_computed() -> None:
    def answer(sequence: Sequence) -> Output:
        asked = sequence.handover
        assert asked is not None
        return finished(sequence) if asked.params is None else failed(sequence)

    raw = Raw(answer)
    done = prefill(raw)
    assert done.fault is None
    assert [sequence.handover for sequence in raw.submitted] == [
        Handover(kind="prefill", params=PARAMS),
        Handover(kind="prefill"),
    ]
    assert (done.cached, done.read, done.computed) == (0, 0, 300)


def test_an_engine_that_fails_without_the_prefix_too_fails_the_job() -> None:
    done = prefill(Raw(failed))
    assert done.fault is not None
    assert done.fault.code == "transfer_failed"
