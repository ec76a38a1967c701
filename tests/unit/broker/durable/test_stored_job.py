"""Stored jobs: all forms of a publisher's message, what they leave out, and what is no job."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from headrace.broker.codec import encode
from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.stored_job import PUBLISH_TRIES, JobPublisher, NewJob, StoredJob, parse_job
from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge
from headrace.broker.messages.requests import Envelope
from headrace.jetstream.errors import NotConnected, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import PubAck
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import LONGEST_DEADLINE_S

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
BODY = msgspec.json.encode(CHAT)
STORED = 1_000_000.0


def parsed(data: bytes = BODY, **headers: str) -> StoredJob:
    named = {key.replace("_", "-"): value for key, value in headers.items()}
    return parse_job(data, named, tenant="acme", seq=7, stored=STORED)


def test_a_plain_body_without_headers_is_a_chat_of_class_batch_with_a_day() -> None:
    job = parsed()
    assert (job.name, job.tenant, job.endpoint, job.body) == ("seq-7", "acme", "/v1/chat/completions", BODY)
    assert (job.request_class, job.deadline, job.durable) == ("batch", STORED + 86_400, False)


def test_headers_say_what_a_body_cannot() -> None:
    job = parsed(Hr_Job="a", Hr_Endpoint="/v1/embeddings", Hr_Class="std", Hr_Deadline=str(STORED + 5), Hr_Stream="1")
    assert (job.name, job.endpoint, job.request_class) == ("a", "/v1/embeddings", "std")
    assert (job.deadline, job.durable) == (STORED + 5, True)


def test_a_line_of_a_batch_file_is_taken_as_it_is() -> None:
    job = parsed(msgspec.json.encode({"custom_id": "l1", "method": "POST", "url": "/v1/completions", "body": CHAT}))
    assert (job.name, job.custom_id, job.endpoint) == ("l1", "l1", "/v1/completions")
    assert msgspec.json.decode(job.body) == CHAT


def test_the_id_is_the_header_then_the_message_id() -> None:
    assert parsed(Nats_Msg_Id="m").name == "m"
    assert parsed(Nats_Msg_Id="m", Hr_Job="j").name == "j"


def test_msgpack_becomes_json() -> None:
    assert msgspec.json.decode(parsed(msgspec.msgpack.encode(CHAT)).body) == CHAT


def test_an_envelope_is_kept_as_it_is() -> None:
    envelope = Envelope(id="x", pool="p", model="m", judge="-", deadline=1.0, created=1.0, tokens=3, payload=b"p")
    assert parsed(encode(envelope)).envelope == envelope


def test_broken_json_is_left_to_the_api() -> None:
    assert parsed(b'{"model": ').body == b'{"model": '


def test_no_deadline_is_beyond_what_is_kept() -> None:
    assert parsed(Hr_Deadline="1e30").deadline == STORED + LONGEST_DEADLINE_S


@pytest.mark.parametrize(
    ("data", "headers", "says"),
    [
        (b"\xc1", {}, "neither a JSON object nor msgpack"),
        (msgspec.msgpack.encode([1]), {}, "msgpack list"),
        (msgspec.msgpack.encode({"payload": b"x"}), {}, "nor an Envelope"),
        (BODY, {"Hr_Class": "gold"}, "'gold'"),
        (BODY, {"Hr_Deadline": "soon"}, "'soon'"),
        (BODY, {"Hr_Deadline": "inf"}, "'inf'"),
        (BODY, {"Hr_Job": "x" * 300}, "256 printable"),
    ],
)
def test_what_is_no_job_is_named(data: bytes, headers: dict[str, str], says: str) -> None:
    with pytest.raises(JobMalformed, match=says):
        parsed(data, **headers)


JOB = NewJob(
    name="a b",
    tenant="acme",
    model_slug="sim",
    endpoint="/v1/completions",
    body=b'{"model":"sim"}',
    deadline=1_700_000_100.5,
    request_class="hi",
    durable=True,
)


class Broker:
    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.messages: list[tuple[str, bytes, Mapping[str, str], str]] = []

    async def publish(self, subject: str, data: bytes, *, headers: Mapping[str, str], msg_id: str, timeout_s: float) -> PubAck:
        self.messages.append((subject, data, headers, msg_id))
        if self.errors:
            raise self.errors.pop(0)
        return PubAck("S", 1)


async def publish(*errors: Exception) -> Broker:
    broker = Broker(*errors)
    await JobPublisher(broker, Subjects("hr")).publish(JOB)  # type: ignore[arg-type]
    return broker


async def test_a_carrier_reads_what_was_published() -> None:
    ((subject, data, headers, _),) = (await publish()).messages
    assert subject == "hr.job.sim.acme"
    job = parse_job(data, headers, tenant="acme", seq=1, stored=1_700_000_000.0)
    assert (job.name, job.endpoint, job.body, job.deadline) == ("a b", JOB.endpoint, JOB.body, JOB.deadline)
    assert (job.request_class, job.durable) == ("hi", True)


async def test_an_unknown_outcome_is_repeated_under_the_same_id_of_this_tenant_alone() -> None:
    broker = await publish(PublishUnknown("?"), PublishUnknown("?"))
    assert [msg_id for *_, msg_id in broker.messages] == ["acme.a b"] * 3


@pytest.mark.parametrize(
    ("errors", "expected"),
    [
        ([PublishUnknown("?")] * PUBLISH_TRIES, BrokerUnavailable),
        ([QueueFull("full")], Overloaded),
        ([PayloadTooLarge("large")], RequestTooLarge),
        ([NotConnected("away")], BrokerUnavailable),
    ],
)
async def test_what_is_not_confirmed_is_an_error_that_clients_know(errors: list[Exception], expected: type[Exception]) -> None:
    with pytest.raises(expected):
        await publish(*errors)
