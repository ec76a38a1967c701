"""Stored jobs: all forms of a publisher's message, what they leave out, and what is no job."""

import msgspec
import pytest

from headrace.broker.codec import encode
from headrace.broker.durable.errors import JobMalformed
from headrace.broker.durable.stored_job import StoredJob, parse_job
from headrace.broker.messages import Envelope
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
