"""Whatever bytes come: a decoder returns a message or refuses it by name, and the readers of an ingress go on."""

from __future__ import annotations

import typing
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.codec import (
    decode,
    decode_ingress_control,
    decode_request,
    decode_worker_control,
    encode,
    parse_job_headers,
    parse_prefill_header,
)
from headrace.broker.errors import WireError
from headrace.broker.ingress.inbox import IngressInbox
from headrace.broker.messages.durable import StreamEntry
from headrace.broker.messages.events import KvMessage, LoadReport
from headrace.broker.messages.frames import Finish, Frame, Part, Row
from headrace.broker.messages.prefill import PrefillJob
from headrace.broker.messages.requests import Envelope, Pooling, Record
from headrace.broker.models.cards import ModelCard
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects
from tests.support import poison
from tests.support.ingress_parts import Parts

READERS: dict[str, tuple[typing.Callable[[bytes], Any], list[Record]]] = {
    "request": (decode_request, poison.requests("p")),
    "ingress control": (decode_ingress_control, poison.ingress_controls()),
    "worker control": (decode_worker_control, poison.worker_controls()),
    "frame": (lambda data: decode(Frame, data), poison.frames()),
    "load": (lambda data: decode(LoadReport, data), poison.loads()),
    "prefill": (lambda data: decode(PrefillJob, data), poison.prefills()),
    "cache event": (lambda data: decode(KvMessage, data), poison.cache_events()),  # type: ignore[arg-type]
    "entry": (lambda data: decode(StreamEntry, data), poison.entries()),
    "card": (lambda data: decode(ModelCard, data), [poison.card("p")]),
    "pooling": (lambda data: decode(Pooling, data), [Pooling(task="embed", inputs=[])]),
}


def read(reader: typing.Callable[[bytes], Any], data: bytes) -> Any:
    try:
        return reader(data)
    except WireError as error:
        return error


@pytest.mark.parametrize("name", READERS)
def test_a_decoder_refuses_rubbish_and_mutations_and_raises_nothing_else(name: str) -> None:
    reader, records = READERS[name]
    for data in poison.RUBBISH:
        assert isinstance(read(reader, data), WireError) or data in (b"\x80", b"\x90"), data[:40]
    for record in records:
        assert not isinstance(read(reader, encode(record)), WireError)
        for data in poison.mutations(record):
            message = read(reader, data)
            if not isinstance(message, WireError):
                assert_bounded(message)


def assert_bounded(value: Any, path: str = "$") -> None:
    """No number of a message that was accepted is endless, or so large that the next sum with it overflows."""
    if isinstance(value, msgspec.Struct):
        for field in msgspec.structs.fields(value):
            if field.name not in ("v", "params", "trace", "logprob", "top", "template_kwargs", "default_sampling"):
                assert_bounded(getattr(value, field.name), f"{path}.{field.name}")
    elif isinstance(value, list | tuple):
        for item in value:
            assert_bounded(item, path)
    elif isinstance(value, dict):
        for item in value.values():
            assert_bounded(item, path)
    elif isinstance(value, float):
        assert abs(value) <= 1e12, (path, value)
    elif isinstance(value, int):
        assert abs(value) < 2**64, (path, value)


@settings(max_examples=100, deadline=None)
@given(st.binary(max_size=200), st.sampled_from(sorted(READERS)))
def test_a_decoder_raises_nothing_but_its_refusal_for_any_bytes(data: bytes, name: str) -> None:
    read(READERS[name][0], data)


@settings(max_examples=100, deadline=None)
@given(st.data(), st.sampled_from(sorted(READERS)))
def test_a_decoder_raises_nothing_but_its_refusal_for_a_message_with_changed_bytes(data: st.DataObject, name: str) -> None:
    reader, records = READERS[name]
    whole = bytearray(encode(data.draw(st.sampled_from(records))))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(whole) - 1))
        whole[at : at + data.draw(st.integers(0, 3))] = data.draw(st.binary(max_size=4))
        if not whole:
            break
    read(reader, bytes(whole))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("judge", "a b"),
        ("judge", ""),
        ("deadline", float("inf")),
        ("deadline", float("nan")),
        ("deadline", -1.0),
        ("deadline", 1e300),
        ("tenant", "a.b"),
        ("pool", ">"),
        ("id", "a\r\nPUB x 0"),
        ("choices", 10**12),
        ("prefer", {"a": float("nan")}),
    ],
)
def test_a_request_is_refused_with_the_name_of_the_field(field: str, value: object) -> None:
    changed = poison.packed({**poison.plain(poison.envelope("p")), field: value})
    with pytest.raises(WireError, match=field):
        decode_request(changed)


def tool_call(index: int) -> bytes:
    return encode(Frame(worker="w", rows=[Row("r", 1, 7, 0, 0, [1], [[Part("tool", "b", index)]])]))


@pytest.mark.parametrize("index", [-1, 4096, 10**12])
def test_no_tool_call_has_an_index_that_a_list_would_be_made_up_to(index: int) -> None:
    assert decode(Frame, tool_call(4095)).rows[0].id == "r"
    with pytest.raises(WireError, match="rows"):
        decode(Frame, tool_call(index))


@pytest.mark.parametrize("value", ["0", "-1", "9" * 21, "9" * 5000, "x", "1e3"])
def test_an_attempt_in_a_header_is_bounded(value: str) -> None:
    with pytest.raises(WireError, match="Hr-Attempt"):
        parse_job_headers({"Hr-Attempt": value})


NESTED = ["[" * 50_000, '{"a":' * 50_000]
ENDLESS = "[" + ",".join(['[1,"w",1]'] * 1025) + "]"


@pytest.mark.parametrize("value", [*NESTED, "[[1,2]]", '[[1,"a.b",1]]', ENDLESS])
def test_nested_or_endless_headers_are_refused(value: str) -> None:
    with pytest.raises(WireError, match="Hr-History"):
        parse_job_headers({"Hr-History": value})
    with pytest.raises(WireError, match="Hr-Prefill"):
        parse_prefill_header({"Hr-Prefill": value})


class Claims:
    def on_claim(self, *_arguments: object) -> None:
        pass

    on_suspicion = on_claim


async def test_an_ingress_reads_on_behind_messages_of_any_content() -> None:
    parts = Parts()
    claims: Any = Claims()
    inbox = IngressInbox(parts.judge, parts.outbox, parts.owner, claims, parts.timelines, lambda _job, _nonce: False)
    whole = poison.plain(poison.frames()[0])
    for data in [*poison.RUBBISH, *(d for record in poison.frames() for d in poison.mutations(record))]:
        inbox.on_frame(Message("hr.out.j", data, "", None))
    for record in poison.ingress_controls():
        for data in poison.mutations(record):
            inbox.on_control(Message("hr.judge.j", data, "reply", None))
    for record in poison.events():
        for data in poison.mutations(record):
            inbox.on_events(Message("hr.ev.p", data, "", None))
    inbox.on_frame(Message("hr.out.j", poison.packed({**whole, "worker": "a.b"}), "", None))
    parts.messages.sent.clear()
    fin = Finish(reason="stop")
    inbox.on_frame(Message("hr.out.j", encode(Frame(worker="w", rows=[Row("r", 1, 7, 0, 0, [5], ["x"], None, fin)])), "", None))
    assert [subject for subject, _ in parts.messages.sent] == ["hr.ctl.w"], "one answer, and nothing of what came before"


async def test_a_verdict_that_cannot_be_sent_is_dropped_and_the_next_ones_go_out() -> None:
    parts = Parts()
    fin = Finish(reason="stop")
    for worker in ("a.b", "w"):
        parts.judge.on_frame(Frame(worker=worker, rows=[Row("no", 1, 7, 0, 0, [5], ["x"], None, fin)]), 0.0)
    parts.outbox.flush()
    parts.outbox.flush()
    assert [subject for subject, _ in parts.messages.sent] == ["hr.ctl.w"]


def test_an_envelope_of_a_stored_job_needs_no_judge() -> None:
    assert decode(Envelope, encode(poison.envelope("p", judge=""))).judge == ""


def test_the_subjects_of_what_was_accepted_can_be_built() -> None:
    names = Subjects("hr")
    for data in poison.mutations(poison.envelope("p")):
        envelope = read(decode_request, data)
        if isinstance(envelope, Envelope):
            names.judge(envelope.judge)
            names.dlq(envelope.pool)
            names.req(envelope.pool, "re", envelope.tenant)
