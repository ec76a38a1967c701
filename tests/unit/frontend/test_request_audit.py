"""Records have the figures of a request; its words only where they are wanted, cut, and without what is redacted."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog

from headrace.broker.codec import decode, encode
from headrace.broker.messages.frames import Row
from headrace.broker.messages.operator import MOST_CONTENT, AuditRecord
from headrace.frontend import request_audit as module
from headrace.frontend.errors import AuditUnusable
from headrace.frontend.metrics import Metrics
from headrace.frontend.request_audit import MOST_KEPT, REDACTED, AuditPolicy, AuditWriter, Content, Ended, read_patterns
from headrace.frontend.settings import AUDIT_LEAVABLE, FrontendSettings
from headrace.jetstream.errors import NotConnected
from headrace.jetstream.subjects import Subjects
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, frontend, say

FIELDS = {
    "model": "m",
    "class": "std",
    "prompt_tokens": 5,
    "completion_tokens": 2,
    "ttft_s": 0.5,
    "workers": ["w"],
    "attempts": 1,
}


def ended(content: Content | None = None) -> Ended:
    return Ended(
        at=1.0,
        id="r",
        route="/v1/chat/completions",
        tenant="acme",
        status=200,
        took_s=2.0,
        key="k",
        fields=FIELDS,
        content=content,
    )


def words(body: bytes = b"call 555-0100", answer: str = "it is 555-0199") -> Content:
    content = Content()
    content.asked(body)
    content.answered([Row("r", 1, 1, 0, 0, [1], [answer])])
    return content


def record(said: Content | None = None, **policy: object) -> AuditRecord:
    settings = {"content": True, **policy}
    made = AuditPolicy("i", **settings).record(ended(said))  # type: ignore[arg-type]
    assert decode(AuditRecord, encode(made)) == made
    return made


def test_what_a_pattern_matches_is_redacted_everywhere() -> None:
    made = record(words(), patterns=[re.compile(r"\d{3}-\d{4}")])
    assert (made.request, made.answer) == (f"call {REDACTED}", f"it is {REDACTED}")


def test_long_words_are_cut_and_say_so() -> None:
    made = record(words(b"x" * (MOST_KEPT + 1), "y" * (MOST_KEPT + 1)))
    assert (len(made.request), len(made.answer), made.cut) == (MOST_CONTENT, MOST_CONTENT, True)
    assert not record(words()).cut


@pytest.mark.parametrize("name", AUDIT_LEAVABLE)
def test_a_field_that_is_left_out_is_in_no_record(name: str) -> None:
    default = msgspec.structs.asdict(AuditRecord(at=0, id="", frontend="i", route="", tenant="t"))[name]
    assert getattr(record(words(), left_out=[name]), name) == default


def test_a_field_that_cannot_be_left_out_is_refused() -> None:
    with pytest.raises(ValueError, match="audit_leave_out: 'tenant'"):
        FrontendSettings(audit_leave_out=["tenant"])


def test_patterns_are_read_from_lines_and_a_wrong_one_is_named(tmp_path: Path) -> None:
    file = tmp_path / "patterns"
    file.write_text("# telephone\n\\d{3}-\\d{4}\n\n")
    assert [one.pattern for one in read_patterns(str(file))] == [r"\d{3}-\d{4}"]
    assert read_patterns(None) == []
    file.write_text("fine\n(\n")
    with pytest.raises(AuditUnusable, match="line 2"):
        read_patterns(str(file))
    with pytest.raises(AuditUnusable, match="cannot be read"):
        read_patterns(str(tmp_path / "none"))


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


def writer_ended(number: int = 0) -> Ended:
    return Ended(at=1.0, id=f"r{number}", route="/v1/completions", tenant="acme", status=200, took_s=0.1)


async def test_records_are_written_under_their_tenant_in_order() -> None:
    bench = Bench()
    for number in range(100):
        bench.writer.note(writer_ended(number))
    taken = await bench.written()
    assert {subject for subject, _ in taken} == {"hr.audit.acme"}
    assert [record.id for _, record in taken] == [f"r{number}" for number in range(100)]
    assert bench.count("written") == 100


async def test_what_finds_the_queue_full_is_dropped_counted_and_said_once() -> None:
    bench = Bench()
    with structlog.testing.capture_logs() as logs:
        for number in range(module.MOST_WAITING + 5):
            bench.writer.note(writer_ended(number))
    assert bench.count("dropped") == 5
    assert [entry["event"] for entry in logs] == ["audit.dropped"]
    assert len(await bench.written()) == module.MOST_WAITING


async def test_a_record_waits_for_a_broker_that_is_away(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "AGAIN_S", 0.0)
    bench = Bench()
    bench.broker.error = NotConnected("away")
    bench.writer.note(writer_ended())
    running = asyncio.ensure_future(bench.writer.run())
    while bench.broker.tries < 3:
        await asyncio.sleep(0)
    bench.broker.error = None
    while not bench.broker.taken:
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert (bench.count("written"), bench.count("dropped")) == (1, 0)


async def test_what_waits_for_a_broker_that_stays_away_is_counted_at_the_end() -> None:
    bench = Bench()
    bench.broker.error = NotConnected("away")
    bench.writer.note(writer_ended())
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
