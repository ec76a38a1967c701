"""Answers are counted by the targets that operators set, and errors that are not the client's own count against them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from headrace.broker.errors import Overloaded
from headrace.broker.jobs import Job
from headrace.frontend.generation.endpoint import counts_as_failed, service_level
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, Step, frontend, row, say


def level(first_token_s: float, rest_s: float = 0.0, tokens: float = 1.0) -> str:
    per_token_s = rest_s / (tokens - 1) if tokens > 1 else None
    return service_level(first_token_s=first_token_s, per_token_s=per_token_s, target_first_s=2.0, target_token_s=0.1)


def test_an_answer_at_its_targets_has_met_them() -> None:
    assert level(2.0, 1.0, 11.0) == "met"
    assert level(2.0) == "met"


def test_a_late_first_token_is_named_even_if_the_rest_is_late_too() -> None:
    assert level(2.001) == "first_token_late"
    assert level(2.001, 9.0, 2.0) == "first_token_late"


def test_slow_tokens_are_judged_by_their_mean() -> None:
    assert level(0.1, 1.01, 11.0) == "tokens_late"
    assert level(0.1, 1.01, 12.0) == "met"


def test_a_target_of_zero_is_met_by_every_answer() -> None:
    found = service_level(first_token_s=99.0, per_token_s=99.0, target_first_s=0.0, target_token_s=0.0)
    assert found == "met"


def test_errors_of_clients_do_not_count_against_the_service() -> None:
    assert [status for status in (400, 401, 404, 422, 429, 500, 503, 504) if counts_as_failed(status)] == [429, 500, 503, 504]


async def counted(ingress: FakeIngress, *, stream: bool = True, **settings: float) -> set[tuple[str, float]]:
    built = frontend(ingress, **settings)
    body = {"model": "tiny", "stream": stream, "messages": [{"role": "user", "content": "hi"}]}
    await Call(built.app, "/v1/chat/completions", body).run()
    samples = [sample for family in built.metrics.levels.collect() for sample in family.samples if sample.value]
    assert {sample.labels["model"] for sample in samples} <= {MODEL}
    return {(sample.labels["result"], sample.value) for sample in samples if sample.name.endswith("_total")}


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_in_time_is_counted_as_met(stream: bool) -> None:
    assert await counted(FakeIngress(), stream=stream) == {("met", 1.0)}


async def test_an_answer_that_begins_late_is_counted_as_late() -> None:
    assert await counted(FakeIngress(), target_first_token_s=1e-9) == {("first_token_late", 1.0)}


async def test_an_answer_of_slow_tokens_is_counted_as_late() -> None:
    assert await counted(FakeIngress(say("a", "b", "c")), target_token_s=1e-9) == {("tokens_late", 1.0)}


async def test_a_request_that_finds_the_queue_full_is_counted_as_failed() -> None:
    ingress = FakeIngress()
    ingress.refusal = Overloaded("full")
    assert await counted(ingress) == {("failed", 1.0)}


async def test_an_answer_that_breaks_is_counted_as_failed_and_not_as_met() -> None:
    def script(_: Job) -> Iterable[Step]:
        yield [row("a")]
        yield []

    assert await counted(FakeIngress(script)) == {("failed", 1.0)}


async def test_a_request_that_is_wrong_is_not_counted() -> None:
    built = frontend(FakeIngress())
    await Call(built.app, "/v1/chat/completions", b"{").run()
    assert not [sample for family in built.metrics.levels.collect() for sample in family.samples]


async def test_a_client_that_leaves_is_not_counted() -> None:
    built = frontend(ingress := FakeIngress(lambda _: []))
    call = Call(
        built.app, "/v1/chat/completions", {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "x"}]}
    )
    task = asyncio.ensure_future(call.run())
    await call.until(lambda: bool(ingress.answers))
    ingress.answers[0].push([row("a")])
    call.leave()
    await task
    assert not [sample for family in built.metrics.levels.collect() for sample in family.samples]
