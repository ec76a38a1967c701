"""A request that cannot be stored at the moment is sent again under the same id, and refused only when its time is over."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from headrace.broker import metrics
from headrace.broker.codec import encode, parse_job_headers
from headrace.broker.errors import BrokerUnavailable
from headrace.broker.ingress import waits
from headrace.broker.ingress.submission import SUBMIT_TRIES, Submission
from headrace.broker.ingress.waits import BrokerWait
from headrace.broker.jobs import Job
from headrace.broker.messages.control import HistoryEntry
from headrace.broker.models.cards import ModelCard
from headrace.broker.protocol.resume import GENERATION
from headrace.broker.settings import IngressSettings, Timing
from headrace.jetstream.errors import DiskFull, JetStreamError, NoLeader, NotConnected, PublishUnknown, TopologyError
from headrace.jetstream.ports import PubAck
from tests.support.ingress_parts import SUBJECTS, Parts

CARD = ModelCard(model="m", pool="p", context_length=64, block_size=16)


class Stream:
    """Fails as it is told, one error per publish, then stores. `endless`: fails with the last one for ever."""

    def __init__(self, *errors: JetStreamError, endless: bool = False) -> None:
        self.errors = list(errors)
        self.endless = endless
        self.ids: list[str] = []

    async def publish(self, *_: Any, msg_id: str, **__: Any) -> PubAck:
        await asyncio.sleep(0)
        self.ids.append(msg_id)
        if self.errors:
            raise self.errors[0] if self.endless else self.errors.pop(0)
        return PubAck("REQ", 7)


class Health:
    def __init__(self) -> None:
        self.trouble = ""
        self.told: list[str] = []

    def stored(self) -> None:
        self.told.append("stored")

    def failed(self, error: JetStreamError) -> None:
        self.told.append(type(error).__name__)


def outcomes() -> dict[str, float]:
    return {name: metrics.BROKER_AWAITED.labels(name)._value.get() for name in ("back", "away", "too_many")}


def submission(parts: Parts, messaging: Any = None, health: Health | None = None, *, longest_s: float = 60.0) -> Submission:
    return Submission(
        messaging or parts.messages,
        SUBJECTS,
        parts.judge,
        parts.open,
        BrokerWait(lambda: False, longest_s=longest_s),
        health,
        parts.tasks,
        settings=IngressSettings(timing=Timing(retry_s=0.0)),
        wall=lambda: 0.0,
    )


async def submit(stream: Stream, *, longest_s: float, deadline_s: float = 60.0, health: Health | None = None) -> PubAck:
    submitting = submission(Parts(), stream, health, longest_s=longest_s)
    job = Job(id="r", card=CARD, prompt_tokens=1, deadline_s=deadline_s)
    return await asyncio.wait_for(submitting.publish(job, b"body"), 10)


async def test_a_request_whose_stream_has_no_leader_waits_for_one_under_one_id() -> None:
    stream, health, before = Stream(NoLeader(), PublishUnknown(), NoLeader(), NoLeader()), Health(), outcomes()
    assert await submit(stream, longest_s=60.0, health=health) == PubAck("REQ", 7)
    assert stream.ids == ["r.1"] * 5
    assert health.told == ["stored"], "a stream that gets its leader back is not reported as broken"
    assert outcomes() == before | {"back": before["back"] + 1}
    assert metrics.AWAITING_BROKER._value.get() == 0


@pytest.mark.parametrize(("longest_s", "deadline_s"), [(0.02, 60.0), (60.0, 0.02), (0.0, 60.0)])
async def test_it_is_refused_when_the_setting_or_its_deadline_says_so(longest_s: float, deadline_s: float) -> None:
    stream, health, before = Stream(NoLeader(), endless=True), Health(), outcomes()
    with pytest.raises(BrokerUnavailable):
        await submit(stream, longest_s=longest_s, deadline_s=deadline_s, health=health)
    assert health.told == ["NoLeader"]
    assert outcomes() == before | {"away": before["away"] + bool(longest_s)}


async def test_without_an_ack_it_is_sent_three_times_also_where_nothing_waits() -> None:
    stream = Stream(PublishUnknown(), endless=True)
    with pytest.raises(BrokerUnavailable):
        await submit(stream, longest_s=0.0)
    assert stream.ids == ["r.1"] * SUBMIT_TRIES


@pytest.mark.parametrize("error", [DiskFull(), TopologyError()])
async def test_a_broker_that_cannot_store_is_no_reason_to_wait(error: JetStreamError) -> None:
    stream = Stream(error, endless=True)
    with pytest.raises(BrokerUnavailable):
        await submit(stream, longest_s=60.0)
    assert len(stream.ids) == 1


async def test_more_requests_than_may_wait_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "MOST", 0)
    before = outcomes()
    with pytest.raises(BrokerUnavailable):
        await submit(Stream(NoLeader(), endless=True), longest_s=60.0)
    assert outcomes() == before | {"too_many": before["too_many"] + 1}


async def test_a_client_that_leaves_ends_the_wait() -> None:
    waiting = asyncio.create_task(submit(Stream(NoLeader(), endless=True), longest_s=60.0))
    async with asyncio.timeout(10):
        while not metrics.AWAITING_BROKER._value.get():
            await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert metrics.AWAITING_BROKER._value.get() == 0


async def test_a_lease_gained_after_a_lapse_submits_open_requests_once_as_a_new_generation() -> None:
    parts = Parts()
    parts.record.history = {HistoryEntry(1, "w")}
    again = submission(parts)
    async with parts.tasks:
        again.on_lease(True)
        again.on_lease(False)
        again.on_lease(True)
        again.on_lease(True)
    assert [subject for subject, _ in parts.messages.published] == [SUBJECTS.req("p", "re", "_")]
    assert parse_job_headers(parts.messages.headers[0]) == (GENERATION, [HistoryEntry(1, "w")])


async def test_a_batch_request_is_submitted_again_behind_interactive_ones() -> None:
    parts = Parts()
    job = parts.open.get("r")
    assert job is not None
    batch = msgspec.structs.replace(job.envelope(), request_class="batch")
    parts.open.add(msgspec.structs.replace(job, body=encode(batch)))
    async with parts.tasks:
        submission(parts).resubmit()
    assert [subject for subject, _ in parts.messages.published] == [SUBJECTS.req("p", "rb", "_")]


async def test_a_request_that_ends_meanwhile_is_not_submitted_again() -> None:
    parts = Parts()
    again = submission(parts)
    parts.messages.failing = [NotConnected("away")]
    async with parts.tasks:
        again.resubmit()
        parts.judge.close("r", None)
    assert parts.messages.published == []


async def test_an_ingress_that_does_not_run_submits_nothing_and_keeps_the_lapse_in_mind() -> None:
    parts = Parts()
    again = submission(parts)
    again.on_lease(False)
    again.on_lease(True)
    assert parts.messages.published == []
    async with parts.tasks:
        again.on_lease(True)
    assert len(parts.messages.published) == 1
