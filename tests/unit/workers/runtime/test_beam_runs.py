"""Beam searches in the runtime, with a scripted engine and a recording session (both fakes, no server)."""

from __future__ import annotations

import asyncio
import math

import pytest

from headrace.broker.messages import Beams, TokenLogprob
from headrace.workers.engine import Capabilities, Fault, Output, Sequence
from headrace.workers.errors import EngineError, EngineOverloaded, RequestInvalid
from tests.support.runtime_bench import Bench, generation, ids_of, running

END = 2
A, B, C = ids_of(" one two three")
CHANCES = {A: 0.5, B: 0.3, C: 0.1, END: 0.06}
TOP = [(token, b"t%d" % token, math.log(chance)) for token, chance in CHANCES.items()]


def reported(sequence: Sequence, top: list[tuple[int, bytes, float]] = TOP, **options: object) -> Output:
    assert sequence.logprobs is not None
    given = {"finish": "length", "cached_tokens": 2, "logprobs": [TokenLogprob(*top[0], top[: sequence.logprobs])]} | options
    return Output(sequence.id, [top[0][0]], **given)  # type: ignore[arg-type]


def beams(**options: object) -> object:
    return generation(**({"beams": Beams(), "max_tokens": 2} | options))  # type: ignore[arg-type]


async def step(bench: Bench, count: int) -> list[Sequence]:
    """Answer the last `count` sequences that the engine was given."""
    asked = bench.engine.taken[-count:]
    bench.step(*map(reported, asked))
    await bench.settle()
    return asked


async def test_each_open_beam_is_a_run_of_one_token_and_the_beams_are_the_choices() -> None:
    async with running() as bench:
        run = await bench.start(beams(), choices=2)  # type: ignore[arg-type]
        (first,) = await step(bench, 1)
        assert (first.token_ids, first.prompt_tokens, first.logprobs) == ([10, 11, 12], 3, 4)
        assert (first.sampling.temperature, first.sampling.max_tokens) == (0.0, 1)
        assert bench.session.fins == {}, "nothing is sent before the search has ended"
        second = await step(bench, 2)
        assert [one.token_ids for one in second] == [[10, 11, 12, A], [10, 11, 12, B]]
        assert len({one.id for one in bench.engine.taken}) == 3
        assert bench.session.text == {0: " one one", 1: " one two"}
        assert bench.session.ids == {0: [A, A], 1: [A, B]}
        assert run.complete
        fin = bench.session.fins[1]
        assert (fin.reason, fin.prompt_tokens, fin.completion_tokens, fin.cached_tokens) == ("length", 3, 2, 2)
        assert (bench.session.computed, bench.session.logprobs) == ([1], [])
        assert bench.engine.aborted == []


async def test_an_end_token_ends_a_beam_and_is_named_but_not_counted() -> None:
    ends = [(END, b"", -0.01), (A, b"", -8.0), (B, b"", -9.0), (C, b"", -9.5)]
    async with running() as bench:
        await bench.start(beams(logprobs=1, max_tokens=8), choices=1)  # type: ignore[arg-type]
        await step(bench, 1)
        bench.step(reported(bench.engine.taken[-1], ends, finish="stop"))
        await bench.settle()
        fin = bench.session.fins[0]
        assert (fin.reason, fin.stop, fin.completion_tokens) == ("stop", END, 1)
        assert bench.session.text == {0: " one"}
        assert [(entry.id, len(entry.top)) for entry in bench.session.logprobs] == [(A, 1)]


async def test_the_end_token_is_an_id_without_text_where_it_is_asked_for_and_a_word_where_ends_are_ignored() -> None:
    ends = [(END, b"", -0.01), (A, b"", -8.0)]
    async with running() as bench:
        await bench.start(beams(include_stop=True), choices=1)  # type: ignore[arg-type]
        bench.step(reported(bench.engine.taken[-1], ends, finish="stop"))
        await bench.settle()
        assert (bench.session.ids, bench.session.text) == ({0: [END]}, {0: ""})
        assert bench.session.fins[0].completion_tokens == 1
    async with running() as bench:
        await bench.start(beams(sampling={"ignore_eos": True}, max_tokens=1), choices=1)  # type: ignore[arg-type]
        assert bench.engine.taken[-1].sampling.ignore_eos
        bench.step(reported(bench.engine.taken[-1], ends))
        await bench.settle()
        assert (bench.session.ids, bench.session.fins[0].reason) == ({0: [END]}, "length")


async def test_a_search_of_which_nothing_was_sent_begins_anew_elsewhere_and_else_ends_with_a_typed_fault() -> None:
    async with running() as bench:
        run = await bench.start(beams(), choices=2, emitted=[[], []])  # type: ignore[arg-type]
        assert len(bench.engine.taken) == 1
        assert bench.runtime.resumable(run)
        await bench.start(beams(), choices=2, emitted=[[A], []])  # type: ignore[arg-type]
        assert [fault.code for fault in bench.session.failed] == ["resume_impossible"]
        assert len(bench.engine.taken) == 1


async def test_a_stopped_search_is_aborted_in_the_engine_and_silent() -> None:
    async with running() as bench:
        run = await bench.start(beams(), choices=2)  # type: ignore[arg-type]
        await step(bench, 1)
        asked = bench.engine.taken[-2:]
        bench.runtime.stop(run)
        await bench.settle()
        assert bench.engine.aborted == [one.id for one in asked]
        await step(bench, 2)
        assert (len(bench.engine.taken), bench.session.fins) == (3, {})


async def test_a_parked_search_repeats_its_step_under_other_ids_and_goes_on() -> None:
    async with running() as bench:
        run = await bench.start(beams(), choices=2)  # type: ignore[arg-type]
        await step(bench, 1)
        before = bench.engine.taken[-2:]
        bench.runtime.park(run)
        await bench.settle()
        assert bench.engine.aborted == [one.id for one in before]
        await step(bench, 2)
        assert bench.session.fins == {}
        bench.runtime.unpark(run)
        await bench.settle()
        again = await step(bench, 2)
        assert [one.token_ids for one in again] == [one.token_ids for one in before]
        assert not {one.id for one in again} & {one.id for one in before}
        assert bench.session.text == {0: " one one", 1: " one two"}


@pytest.mark.parametrize(
    ("output", "failed", "moved"),
    [
        ({"fault": Fault("engine_error", "broke", retriable=True)}, [], ["engine_error"]),
        ({"fault": Fault("invalid_request", "no", retriable=False)}, ["invalid_request"], []),
        ({"finish": "abort"}, [], ["engine_error"]),
        ({"finish": "length"}, ["engine_error"], []),
        ({"logprobs": [TokenLogprob(A, b"", -1.0, TOP[:3])]}, ["engine_error"], []),
    ],
    ids=["fault", "invalid", "aborted", "no log-probabilities", "too few candidates"],
)
async def test_a_step_that_fails_ends_or_moves_the_search(output: dict, failed: list[str], moved: list[str]) -> None:
    async with running() as bench:
        await bench.start(beams(), choices=2)  # type: ignore[arg-type]
        await step(bench, 1)
        one, other = bench.engine.taken[-2:]
        bench.step(Output(one.id, [], **output))
        await bench.settle()
        assert [fault.code for fault in bench.session.failed] == failed
        assert [fault.code for fault in bench.session.moved] == moved
        assert other.id in bench.engine.aborted
        assert bench.session.fins == {}


@pytest.mark.parametrize(
    ("refusal", "failed", "moved"),
    [
        (RequestInvalid("bad"), ["invalid_request"], []),
        (EngineOverloaded("full"), [], ["engine_error"]),
        (EngineError("odd"), ["engine_error"], []),
    ],
)
async def test_refusals_of_the_engine_become_typed_faults(refusal: EngineError, failed: list[str], moved: list[str]) -> None:
    async with running() as bench:
        bench.engine.refuse = refusal
        await bench.start(beams())  # type: ignore[arg-type]
        assert [fault.code for fault in bench.session.failed] == failed
        assert [fault.code for fault in bench.session.moved] == moved


@pytest.mark.parametrize(
    ("options", "choices", "param"),
    [
        ({}, 5, "n"),
        ({"guided": {"regex": "a+"}}, 2, "guided"),
        ({"prompt_logprobs": 1}, 2, "prompt_logprobs"),
    ],
)
async def test_what_a_search_cannot_honour_is_refused_by_name(options: dict, choices: int, param: str) -> None:
    async with running() as bench:
        await bench.start(beams(**options), choices=choices)  # type: ignore[arg-type]
        assert [(fault.code, fault.param) for fault in bench.session.failed] == [("invalid_request", param)]
        assert bench.engine.taken == []


async def test_an_engine_that_declares_no_beam_search_is_not_asked() -> None:
    async with running() as bench:
        bench.engine.capabilities = Capabilities(logprobs=True)
        await bench.start(beams())  # type: ignore[arg-type]
        assert [(fault.code, fault.param) for fault in bench.session.failed] == [("invalid_request", "use_beam_search")]
        assert bench.engine.taken == []


async def test_a_step_that_the_engine_forgets_is_tried_on_another_worker() -> None:
    async with running(first_token_s=0.02) as bench:
        await bench.start(beams())  # type: ignore[arg-type]
        async with asyncio.timeout(10):
            while not bench.session.moved:
                await asyncio.sleep(0.01)
        assert bench.engine.aborted == [bench.engine.taken[0].id]


async def test_a_search_that_stands_still_counts_as_work_for_the_watchdog() -> None:
    async with running(stall_s=0.05) as bench:
        await bench.start(beams())  # type: ignore[arg-type]
        assert "no step" in await asyncio.wait_for(bench.runtime.dead, 10)
