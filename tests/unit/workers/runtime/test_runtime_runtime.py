"""The runtime between session and engine, with a scripted engine and a recording session (both fakes, no server)."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.blocks import block_chain
from headrace.broker.codec import encode, pack_u32, pack_u64
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.frames import TokenLogprob
from headrace.broker.messages.requests import Envelope, Generation, Sampling
from headrace.broker.protocol.run import Run
from headrace.workers.engine import Capabilities, Fault, Load, Output
from headrace.workers.errors import EngineDead, EngineError, EngineOverloaded, RequestInvalid
from tests.support.runtime_bench import TABLE, Bench, generation, ids_of, running
from tests.unit.broker.protocol.test_protocol_runs import FakeDelivery


async def test_each_choice_is_a_sequence_and_a_step_is_flushed_once() -> None:
    async with running() as bench:
        await bench.start(generation(sampling={"seed": 7}), choices=2)
        first, second = bench.engine.taken
        assert (first.token_ids, first.prompt_tokens, first.sampling.max_tokens) == ([10, 11, 12], 3, 20)
        assert [s.sampling.seed for s in bench.engine.taken] == [7, 8], "choices of a seeded request differ"
        a, b = ids_of(" hello world")
        before = bench.session.flushes
        bench.step(Output(first.id, [a], cached_tokens=2), Output(second.id, [a, b]))
        assert bench.session.flushes == before + 1
        bench.step(Output(first.id, [b], finish="length"))
        assert bench.session.text == {0: " hello world", 1: " hello world"}
        fin = bench.session.fins[0]
        assert (fin.reason, fin.prompt_tokens, fin.completion_tokens, fin.cached_tokens) == ("length", 3, 2, 2)


async def test_an_engine_learns_the_trace_of_each_choice() -> None:
    trace = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    async with running() as bench:
        await bench.start(generation(), choices=2, trace=trace)
        assert [sequence.trace for sequence in bench.engine.taken] == [trace, trace]


async def test_what_comes_with_a_later_token_does_not_get_lost_on_the_short_way() -> None:
    a, b = ids_of(" hello world")
    async with running() as bench:
        await bench.start(generation(logprobs=0))
        name = bench.engine.taken[0].id
        for token in (a, b, a):
            bench.step(Output(name, [token], logprobs=[TokenLogprob(token, b"", -0.5)]))
        assert [entry.id for entry in bench.session.logprobs] == bench.session.ids[0] == [a, b, a]
        bench.step(Output(name, [b], fault=Fault("x", "broke", retriable=False)))
        assert [fault.message for fault in bench.session.failed] == ["broke"]


async def test_a_stop_string_cuts_the_text_and_aborts_the_engine() -> None:
    async with running() as bench:
        await bench.start(generation(stop=[" world"]))
        (sequence,) = bench.engine.taken
        bench.step(*(Output(sequence.id, [i]) for i in ids_of(" hello world again")))
        await bench.settle()
        assert bench.session.text[0] == " hello"
        assert (bench.session.fins[0].reason, bench.session.fins[0].stop) == ("stop", " world")
        assert bench.engine.aborted == [sequence.id]


async def test_a_stop_token_is_counted_but_not_shown() -> None:
    async with running() as bench:
        await bench.start(generation())
        (sequence,) = bench.engine.taken
        a, b = ids_of(" hello world")
        bench.step(Output(sequence.id, [a, b], finish="stop", stop=b))
        assert bench.session.text[0] == " hello"
        assert (bench.session.fins[0].stop, bench.session.fins[0].completion_tokens) == (b, 2)


async def test_a_resume_continues_the_text_exactly_with_what_is_left() -> None:
    tokens = ids_of(" one two three🙂 four")
    async with running() as bench:
        run = await bench.start(generation(max_tokens=30, sampling={"min_tokens": 9}), emitted=[tokens[:4]])
        (sequence,) = bench.engine.taken
        assert sequence.token_ids == [10, 11, 12, *tokens[:4]]
        assert (sequence.sampling.max_tokens, sequence.sampling.min_tokens, sequence.prompt_tokens) == (26, 5, 3)
        for token in tokens[4:]:
            bench.step(Output(sequence.id, [token]))
        bench.step(Output(sequence.id, [], finish="length"))
        shown = TABLE_TEXT(tokens[:4])
        assert shown + bench.session.text[0] == " one two three🙂 four"
        assert bench.session.fins[0].completion_tokens == len(tokens)
        assert run.choices[0].ids == tokens


def TABLE_TEXT(ids: list[int]) -> str:  # noqa: N802
    from headrace.workers.detokenize import TextPipeline

    pipeline = TextPipeline(TABLE, prompt_ids=[10], stop=[], include_stop=False, skip_special_tokens=True)
    return "".join(pipeline.push(i) for i in ids)


async def test_a_resume_with_no_token_left_ends_without_the_engine() -> None:
    async with running() as bench:
        await bench.start(generation(max_tokens=4), emitted=[ids_of(" one two three four")])
        assert bench.engine.taken == []
        assert bench.session.fins[0].reason == "length"


@pytest.mark.parametrize(("options", "can"), [({}, True), ({"guided": {"regex": "a+"}}, False)])
async def test_it_knows_which_runs_another_worker_could_go_on_with(options: dict, can: bool) -> None:
    async with running() as bench:
        run = await bench.start(generation(**dict(options)), emitted=[[]])
        assert bench.runtime.resumable(run)
        run.choices[0].ids.append(20)  # given out
        assert bench.runtime.resumable(run) == can


@pytest.mark.parametrize(
    "options", [{"guided": {"regex": "a+"}}, {"sampling": {"presence_penalty": 1.0}}, {"sampling": {"frequency_penalty": 0.5}}]
)
async def test_what_cannot_be_continued_ends_with_a_typed_fault_but_restarts_if_nothing_was_given_out(options: dict) -> None:
    async with running() as bench:
        await bench.start(generation(**dict(options)), emitted=[[20, 21]])
        assert [f.code for f in bench.session.failed] == ["resume_impossible"]
        assert bench.engine.taken == []
        await bench.start(generation(**dict(options)), emitted=[[]])
        assert len(bench.engine.taken) == 1


@pytest.mark.parametrize(
    ("refusal", "failed", "moved"),
    [
        (RequestInvalid("bad", param="seed"), ["invalid_request"], []),
        (EngineOverloaded("full"), [], ["engine_overloaded"]),
        (EngineError("odd"), ["engine_error"], []),
    ],
)
async def test_refusals_of_the_engine_become_typed_faults(refusal: EngineError, failed: list[str], moved: list[str]) -> None:
    async with running() as bench:
        bench.engine.refuse = refusal
        await bench.start(generation())
        assert [f.code for f in bench.session.failed] == failed
        assert [f.code for f in bench.session.moved] == moved


async def test_what_the_engine_does_not_declare_is_refused_by_name_before_it_is_asked() -> None:
    async with running() as bench:
        bench.engine.capabilities = Capabilities()
        await bench.start(generation(logprobs=1))
        assert [(fault.code, fault.param) for fault in bench.session.failed] == [("invalid_request", "logprobs")]
        assert bench.engine.taken == []


async def test_faults_in_the_middle_are_moved_or_failed() -> None:
    async with running() as bench:
        for retriable in (True, False):
            await bench.start(generation())
            bench.step(Output(bench.engine.taken[-1].id, [], fault=Fault("x", "broke", retriable)))
        await bench.start(generation())
        bench.step(Output(bench.engine.taken[-1].id, [], finish="abort"))
        assert [f.message for f in bench.session.failed] == ["broke"]
        assert len(bench.session.moved) == 2


async def test_a_dead_engine_is_declared_once() -> None:
    async with running() as bench:
        bench.engine.refuse = EngineDead("gone")
        await bench.start(generation())
        bench.engine.death.set_result("later")
        await bench.settle()
        assert bench.runtime.dead.result() == "gone"


async def test_the_requests_that_a_dead_engine_names_are_told_by_their_own_ids() -> None:
    async with running() as bench:
        await bench.start(generation(), choices=2)
        assert bench.runtime.blamed() == frozenset()
        bench.engine.named = frozenset({bench.engine.taken[1].id, "unheard-of"})
        assert bench.runtime.blamed() == {"q"}


async def test_an_engine_that_says_nothing_while_it_has_work_is_declared_dead() -> None:
    async with running(stall_s=0.05) as bench:
        await asyncio.sleep(0.1)
        assert not bench.runtime.dead.done(), "an idle engine has nothing to say"
        await bench.start(generation())
        async with asyncio.timeout(5):
            assert "no step for" in await bench.runtime.dead


@pytest.mark.parametrize(
    ("payload", "reason"),
    [
        (b"\xc1", "malformed payload"),
        (encode(Generation(token_ids=b"123")), "malformed payload"),
        (encode(Generation(token_ids=b"")), "empty"),
        (encode(Generation(token_ids=pack_u32([1] * 100))), "context length is 100"),
    ],
)
async def test_bad_payloads_fail_with_the_reason(payload: bytes, reason: str) -> None:
    async with running() as bench:
        envelope = Envelope(id="q", pool="p", model="m", judge="i", deadline=9e9, created=0.0, tokens=3)
        run = Run(envelope=envelope, attempt=1, history=[], run=5, delivery=FakeDelivery(1))
        run.begin([], [])
        bench.runtime.start(run, payload)
        assert reason in bench.session.failed[0].message
        assert bench.session.failed[0].code == "invalid_request"


async def test_stopping_a_run_aborts_its_sequences_and_late_outputs_are_ignored() -> None:
    async with running() as bench:
        run = await bench.start(generation(), choices=2)
        bench.runtime.stop(run)
        await bench.settle()
        assert sorted(bench.engine.aborted) == sorted(s.id for s in bench.engine.taken)
        bench.step(Output(bench.engine.taken[0].id, [20]))
        assert bench.session.ids == {}


async def test_a_parked_run_leaves_the_engine_and_continues_from_its_log() -> None:
    tokens = ids_of(" one two three")
    async with running() as bench:
        run = await bench.start(generation())
        bench.step(Output(bench.engine.taken[0].id, [tokens[0]]))
        bench.runtime.park(run)
        await bench.settle()
        assert bench.engine.aborted == [bench.engine.taken[0].id]
        bench.runtime.unpark(run)
        await bench.settle()
        again = bench.engine.taken[1]
        assert again.token_ids[3:] == [tokens[0]]
        assert again.sampling.max_tokens == 19
        bench.step(Output(again.id, tokens[1:], finish="length"))
        assert bench.session.text[0] == " one two three"


async def test_logprobs_stop_where_the_text_stops() -> None:
    async with running() as bench:
        await bench.start(generation(stop=[" world"], logprobs=0))
        ids = ids_of(" hello world again")
        probs = [TokenLogprob(i, b"", -0.5) for i in ids]
        bench.step(Output(bench.engine.taken[0].id, ids, logprobs=probs))
        assert [p.id for p in bench.session.logprobs] == ids[:2]


# -- what routers are told -----------------------------------------------------------------------------------


def report(bench: Bench) -> LoadReport:
    empty = LoadReport(worker="w", epoch=1, n=1, at=0.0, slots=1, running=0, waiting=0)
    return bench.runtime.load(empty)


async def test_the_first_token_tells_once_what_had_to_be_computed():
    async with running() as bench:
        await bench.start(generation(), choices=2)
        second = bench.engine.taken[1].id
        bench.step(Output(second, [], cached_tokens=2))
        assert bench.session.computed == []
        bench.step(Output(second, [5]), Output(bench.engine.taken[0].id, [5], cached_tokens=0))
        bench.step(Output(second, [6]))
        assert bench.session.computed == [1]


async def test_a_resumed_run_computes_what_was_emitted_too():
    async with running() as bench:
        await bench.start(generation(), emitted=[[20, 21]])
        bench.step(Output(bench.engine.taken[0].id, [5], cached_tokens=1))
        assert bench.session.computed == [4]


async def test_the_engine_is_told_what_its_cache_should_have():
    prompt = [*range(80)]
    chain = block_chain(prompt, 32)
    asked = Generation(token_ids=pack_u32(prompt), sampling=Sampling(max_tokens=2))
    for cached, expected in ((set(), 0), ({chain[0]}, 32), ({chain[0], chain[1]}, 64), ({chain[1]}, 0)):
        async with running() as bench:
            bench.runtime.watch_cache(lambda cached=cached: cached, tiers=list)
            await bench.start(asked, hashes=pack_u64(chain))
            assert bench.engine.taken[0].expected_cached == expected


async def test_at_least_one_token_is_never_expected_in_the_cache():
    prompt = [*range(64)]
    chain = block_chain(prompt, 32)
    async with running() as bench:
        bench.runtime.watch_cache(lambda: set(chain), tiers=list)
        await bench.start(Generation(token_ids=pack_u32(prompt), sampling=Sampling(max_tokens=2)), hashes=pack_u64(chain))
        assert bench.engine.taken[0].expected_cached == 32


async def test_a_report_counts_what_is_on_its_way_into_the_engine():
    async with running() as bench:
        bench.engine.load = lambda: Load(queued_prefill_tokens=5, step_prefill_tokens=7, step_decodes=2, step_s=0.5)
        bench.settle = lambda: asyncio.sleep(0) if bench.engine.taken else _nothing()
        await bench.start(generation(), choices=2)
        assert not bench.engine.taken
        assert report(bench).queued_prefill_tokens == 5 + 2 * 3
        await asyncio.sleep(0.01)
        assert len(bench.engine.taken) == 2
        filled = report(bench)
        assert (filled.queued_prefill_tokens, filled.step_prefill_tokens, filled.step_decodes, filled.step_s) == (5, 7, 2, 0.5)


async def test_a_report_has_the_cached_blocks_per_tier_once_the_cache_is_watched():
    async with running() as bench:
        assert report(bench).tiers == []
        bench.runtime.watch_cache(set, tiers=lambda: [5, 3, 0])
        assert report(bench).tiers == [5, 3, 0]


async def _nothing() -> None:
    """Do not give way."""
