"""Requests are recorded behind a bounded queue: nothing waits for the broker, and what is dropped is counted and said."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
import structlog

from headrace.broker.codec import decode
from headrace.broker.messages import AuditRecord
from headrace.frontend.metrics import Metrics
from headrace.frontend.request_audit import writer as module
from headrace.frontend.request_audit.policy import AuditPolicy, Ended
from headrace.frontend.request_audit.writer import AuditWriter
from headrace.jetstream.errors import NotConnected, PayloadTooLarge
from headrace.jetstream.subjects import Subjects
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, frontend, say


class Broker:
    """Takes records, or refuses them."""

    def __init__(self) -> None:
        self.error: Exception | None = None
        self.taken: list[tuple[str, AuditRecord]] = []
        self.tries = 0

    async def publish(self, subject: str, data: bytes, **_: Any) -> None:
        self.tries += 1
        if self.error is not None:
            raise self.error
        self.taken.append((subject, decode(AuditRecord, data)))


class Bench:
    def __init__(self, *, content: bool = False) -> None:
        self.broker = Broker()
        self.metrics = Metrics()
        policy = AuditPolicy("i", content=content)
        self.writer = AuditWriter(self.broker, Subjects("hr"), policy, self.metrics)  # type: ignore[arg-type]

    def count(self, outcome: str) -> float:
        value = self.metrics.audit_records.labels(outcome)._value.get()
        assert isinstance(value, float)
        return value

    async def written(self) -> list[tuple[str, AuditRecord]]:
        """Run the writer for a moment, and to its end."""
        running = asyncio.ensure_future(self.writer.run())
        for _ in range(20):
            await asyncio.sleep(0)
        running.cancel()
        await asyncio.wait([running])
        return self.broker.taken


def ended(number: int = 0) -> Ended:
    return Ended(at=1.0, id=f"r{number}", route="/v1/completions", tenant="acme", status=200, took_s=0.1)


async def test_records_are_written_under_their_tenant_in_order() -> None:
    bench = Bench()
    for number in range(100):
        bench.writer.note(ended(number))
    taken = await bench.written()
    assert {subject for subject, _ in taken} == {"hr.audit.acme"}
    assert [record.id for _, record in taken] == [f"r{number}" for number in range(100)]
    assert bench.count("written") == 100


async def test_what_finds_the_queue_full_is_dropped_counted_and_said_once() -> None:
    bench = Bench()
    with structlog.testing.capture_logs() as logs:
        for number in range(module.MOST_WAITING + 5):
            bench.writer.note(ended(number))
    assert bench.count("dropped") == 5
    assert [entry["event"] for entry in logs] == ["audit.dropped"]
    assert len(await bench.written()) == module.MOST_WAITING


async def test_a_record_waits_for_a_broker_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    bench = Bench()
    bench.broker.error = NotConnected("away")
    bench.writer.note(ended())
    running = asyncio.ensure_future(bench.writer.run())
    while bench.broker.tries < 3:
        await asyncio.sleep(0)
    bench.broker.error = None
    while not bench.broker.taken:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert (bench.count("written"), bench.count("dropped")) == (1, 0)


async def test_a_record_that_no_message_holds_is_dropped_and_not_tried_again() -> None:
    bench = Bench()
    bench.broker.error = PayloadTooLarge("large")
    bench.writer.note(ended())
    await bench.written()
    assert (bench.broker.tries, bench.count("dropped")) == (1, 1)


async def test_what_waits_for_a_broker_that_stays_away_is_counted_at_the_end() -> None:
    bench = Bench()
    bench.broker.error = NotConnected("away")
    bench.writer.note(ended())
    await bench.written()
    assert bench.count("dropped") == 1


@pytest.mark.parametrize("content", [False, True])
async def test_a_request_is_recorded_with_its_words_only_where_they_are_wanted(content: bool) -> None:
    bench = Bench(content=content)
    app = frontend(FakeIngress(say("se", "cret")), notes=bench.writer).app
    body = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "a question"}]}
    await Call(app, "/v1/chat/completions", body, headers={"x-request-id": "mine"}).run()
    ((_, record),) = await bench.written()
    assert (record.model, record.status, record.route, record.client_id) == (MODEL, 200, "/v1/chat/completions", "mine")
    assert (record.completion_tokens, record.tenant) == (2, "_")
    assert record.took_s > 0
    assert ("a question" in record.request, record.answer) == ((True, "secret") if content else (False, ""))


async def test_a_request_that_is_refused_is_recorded_with_its_error() -> None:
    bench = Bench(content=True)
    await Call(frontend(FakeIngress(), notes=bench.writer).app, "/v1/chat/completions", b"{").run()
    ((_, record),) = await bench.written()
    assert (record.status, record.code, record.request) == (400, "malformed_json", "{")
