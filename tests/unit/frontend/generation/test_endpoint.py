"""Answers are counted by the targets that operators set, and errors that are not the client's own count against them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import pytest

from headrace.broker.errors import Overloaded
from headrace.broker.jobs import Job
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, Step, frontend, row, say


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
