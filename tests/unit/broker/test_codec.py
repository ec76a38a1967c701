"""The wire format: any msgpack library can read and write it; rubbish is refused with a reason."""

from __future__ import annotations

import typing

import msgpack
import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.broker.codec import (
    decode,
    decode_ingress_control,
    decode_worker_control,
    encode,
    job_headers,
    pack_u32,
    pack_u64,
    parse_job_headers,
    unpack_u32,
    unpack_u64,
    unpack_u64_array,
)
from headrace.broker.errors import MalformedMessage, UnsupportedVersion
from headrace.broker.messages.control import Claim, Drain, HistoryEntry
from headrace.broker.messages.requests import WIRE_VERSION, Envelope, Record
from headrace.broker.models import cards
from tests.support.wire_samples import every_message

EVERY_RECORD = sorted(
    {
        kind
        for kind in (*every_message().values(), *vars(cards).values())
        if isinstance(kind, type) and issubclass(kind, Record) and kind is not Record
    },
    key=lambda kind: kind.__name__,
)


@pytest.mark.parametrize("kind", EVERY_RECORD, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_every_message_is_plain_msgpack_and_survives_the_reference_package(kind: type[Record], data: st.DataObject) -> None:
    message = data.draw(struct(kind))
    raw = encode(message)
    plain = msgpack.unpackb(raw, strict_map_key=False)
    assert plain["v"] == WIRE_VERSION, "the version is always on the wire"
    assert decode(kind, raw) == message
    assert decode(kind, msgpack.packb(plain)) == message


@pytest.mark.parametrize("kind", EVERY_RECORD, ids=lambda kind: kind.__name__)
@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_unknown_fields_are_ignored_and_a_newer_version_is_refused(kind: type[Record], data: st.DataObject) -> None:
    message = data.draw(struct(kind))
    plain = msgpack.unpackb(encode(message), strict_map_key=False)
    assert decode(kind, msgpack.packb({**plain, "from_the_future": [1, {"x": 2}]})) == message
    with pytest.raises(UnsupportedVersion, match="version 2"):
        decode(kind, msgpack.packb({**plain, "v": 2}))


def struct(kind: type) -> st.SearchStrategy:
    fields = {}
    for field in msgspec.structs.fields(kind):
        if field.name == "v":
            continue
        fields[field.name] = values(field.type)
    return st.builds(kind, **fields)


def values(kind: typing.Any) -> st.SearchStrategy:
    origin = typing.get_origin(kind)
    arguments = typing.get_args(kind)
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        return struct(kind)
    if origin is typing.Annotated:
        return constrained(arguments[0], arguments[1])
    if origin is typing.Literal:
        return st.sampled_from(arguments)
    if origin is list:
        return st.lists(values(arguments[0]), max_size=3)
    if origin is tuple:
        return st.tuples(*(values(a) for a in arguments))
    if origin is dict:
        return st.dictionaries(values(arguments[0]), values(arguments[1]), max_size=2)
    if arguments:  # a union
        return st.one_of([values(a) for a in arguments])
    return {
        int: st.integers(0, 2**63 - 1),
        float: st.floats(allow_nan=False, allow_infinity=False),
        str: st.text(max_size=8),
        bytes: st.binary(max_size=8),
        bool: st.booleans(),
        type(None): st.none(),
        typing.Any: st.one_of(st.integers(0, 9), st.text(max_size=4), st.none()),
    }[kind]


def constrained(kind: typing.Any, meta: msgspec.Meta) -> st.SearchStrategy:
    if meta.pattern is not None:
        return st.from_regex(meta.pattern)
    if kind is str:
        return st.text(min_size=meta.min_length or 0, max_size=8)
    least = meta.ge if meta.ge is not None else 0
    most = meta.le if meta.le is not None else meta.lt - 1 if meta.lt is not None else 2**63 - 1
    if kind is int:
        return st.integers(least, most)
    return st.floats(least, most) if kind is float else values(kind)


def envelope_map() -> dict[str, object]:
    return {"v": 1, "id": "q", "pool": "p", "model": "m", "judge": "i", "deadline": 1.0, "created": 0.5, "tokens": 3}


def test_a_publisher_in_another_language_needs_only_the_required_fields() -> None:
    envelope = decode(Envelope, msgpack.packb(envelope_map()))
    assert (envelope.choices, envelope.tenant, envelope.payload) == (1, "_", b"")


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "truncated"),
        (b"\xc1", "malformed"),
        (msgpack.packb([1, 2]), "expected `object`"),
        (msgpack.packb({"v": 1, "id": "q"}), "missing required field `pool`"),
        (msgpack.packb(envelope_map() | {"tokens": "three"}), r"\$.tokens"),
        (msgpack.packb(envelope_map() | {"id": b"\xff"}), r"\$.id"),
    ],
)
def test_malformed_messages_are_refused_with_what_is_wrong(data: bytes, reason: str) -> None:
    with pytest.raises(MalformedMessage, match=f"(?i)not a Envelope: .*{reason}"):
        decode(Envelope, data)


def test_control_messages_are_told_apart_by_their_op() -> None:
    claim = Claim(id="q", attempt=2, run=3, worker="w")
    assert decode_ingress_control(encode(claim)) == claim
    assert decode_worker_control(encode(Drain(grace_s=1.0))) == Drain(grace_s=1.0)
    with pytest.raises(MalformedMessage, match="claim"):
        decode_worker_control(encode(claim))


@given(st.lists(st.integers(0, 2**32 - 1)))
def test_token_ids_travel_as_little_endian_u32(ids: list[int]) -> None:
    packed = pack_u32(ids)
    assert packed == b"".join(i.to_bytes(4, "little") for i in ids)
    assert unpack_u32(packed) == ids


@given(st.lists(st.integers(0, 2**64 - 1)))
def test_block_values_travel_as_little_endian_u64(values: list[int]) -> None:
    assert unpack_u64(pack_u64(values)) == values
    assert unpack_u64_array(pack_u64(values)).tolist() == values


@pytest.mark.parametrize("bad", [[-1], [2**32], ["a"]])
def test_an_id_that_is_no_u32_is_refused(bad: list) -> None:
    with pytest.raises(MalformedMessage, match="not a u32"):
        pack_u32(bad)


def test_packed_integers_of_a_wrong_length_are_refused() -> None:
    with pytest.raises(MalformedMessage, match="5 bytes"):
        unpack_u32(b"12345")


def test_a_first_attempt_needs_no_headers() -> None:
    assert job_headers(1, []) == {}
    assert parse_job_headers(None) == (1, [])


WORKERS = st.sampled_from(["w", "a-1", "b#engine"])


@given(
    st.integers(1, 10**6),
    st.lists(
        st.builds(HistoryEntry, st.integers(1, 99), st.sampled_from(["w", "a-1", "b#engine"]), st.integers(0, 99)), max_size=4
    ),
)
def test_attempt_and_history_survive_their_headers(attempt: int, history: list[HistoryEntry]) -> None:
    headers = job_headers(attempt, history)
    assert all(value.isascii() and "\n" not in value for value in headers.values())
    assert parse_job_headers(headers) == (attempt, history)


def test_a_history_from_before_groups_were_written_is_read() -> None:
    headers = {"Hr-Attempt": "2", "Hr-History": '[[1,"w1"]]'}
    assert parse_job_headers(headers) == (2, [HistoryEntry(1, "w1", 0)])
    assert job_headers(2, [HistoryEntry(1, "w1", 0)]) == headers


@pytest.mark.parametrize(
    "headers", [{"Hr-Attempt": "x"}, {"Hr-Attempt": "0"}, {"Hr-History": "{"}, {"Hr-History": '[["a",1]]'}]
)
def test_bad_headers_are_refused_by_name(headers: dict[str, str]) -> None:
    with pytest.raises(MalformedMessage, match=next(iter(headers))):
        parse_job_headers(headers)
