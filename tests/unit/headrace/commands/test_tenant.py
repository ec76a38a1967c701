"""How stored bytes become JSON in an export, and names of objects names of files."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.commands.tenant import file_name, readable


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b'{"a":1}', b'{"a":1}'),
        (msgspec.msgpack.encode({"a": [1, "x"]}), b'{"a":[1,"x"]}'),
        (b"\xff\xfe", b'{"base64":"//4="}'),
        (b"", b'{"base64":""}'),
        (msgspec.msgpack.encode({b"x": 1}), None),
    ],
)
def test_json_and_msgpack_are_shown_and_the_rest_is_base64(data: bytes, shown: bytes | None) -> None:
    encoded = msgspec.json.encode(readable(data))
    assert encoded == shown or shown is None


@given(st.binary(max_size=64))
def test_any_bytes_become_one_line_of_json(data: bytes) -> None:
    line = msgspec.json.encode({"value": readable(data)})
    assert msgspec.json.decode(line)


@given(st.text(min_size=1, max_size=40), st.text(min_size=1, max_size=40))
def test_names_of_files_lead_nowhere_else_and_are_never_the_same(one: str, other: str) -> None:
    for name in (one, other):
        safe = file_name(name)
        assert safe
        assert not set(safe) & set("/\\\0\n")
        assert not safe.startswith(".")
    assert (file_name(one) == file_name(other)) == (one == other)
