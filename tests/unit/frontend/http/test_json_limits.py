"""The shape of a body is known before anything is built from it."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.frontend.errors import MalformedBody
from headrace.frontend.http.json_limits import INLINE_BYTES, check_shape, check_shape_now
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import FakeIngress, chat, frontend, post

LIMITS = FrontendSettings(max_json_depth=8, max_json_containers=50, max_json_values=100)


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max(map(depth_of, value.values()), default=0)
    return 1 + max(map(depth_of, value), default=0) if isinstance(value, list) else 0


TEXTS = st.text(alphabet='ab"\\[]{}:,\n é', max_size=12)
DOCUMENTS = st.recursive(
    TEXTS | st.integers(), lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=25
)


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.booleans())
def test_depth_is_counted_outside_of_texts_only(document: Any, ascii_only: bool) -> None:
    raw = json.dumps(document, ensure_ascii=ascii_only).encode()
    limits = FrontendSettings(max_json_depth=max(1, depth_of(document)))
    check_shape_now(raw, limits)
    if depth_of(document) > 1:
        with pytest.raises(MalformedBody, match="levels deep"):
            check_shape_now(raw, FrontendSettings(max_json_depth=depth_of(document) - 1))


@pytest.mark.parametrize("pad", range(65_500, 65_560, 3))
def test_windows_may_end_anywhere(pad: int) -> None:
    """A text with brackets, quotes and backslashes lies across the border of two windows."""
    text = "x" * pad + '\\"[[[[[[[[[[[["\\\\' * 9
    raw = json.dumps({"a": text, "b": [1, [2]]}).encode()
    check_shape_now(raw, LIMITS)
    deep = json.dumps({"a": text, "b": json.loads("[" * 9 + "]" * 9)}).encode()
    with pytest.raises(MalformedBody, match="more than 8 levels"):
        check_shape_now(deep, LIMITS)


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (b"[" * 9, "8 levels deep"),
        (b'["]",' * 9, "8 levels deep"),
        (b'{"a":' * 9, "8 levels deep"),
        (b"[" + b"[]," * 60, "50 lists, objects"),
        (b"{" + b'"a":1,' * 60, "50 lists, objects"),
        (b"[" + b"1," * 120, "100 values"),
        (b'["a' + b"\\n" * 250, "100 values"),
        (b"[" + b'"",' * 60, "100 values"),
        (b'["' + "水".encode() * 400, "100 values"),
        (b"[" + b"1,1,[]," * 28, "too much of everything: 28 lists, .* 84 values"),
    ],
)
def test_too_much_of_anything_is_refused(body: bytes, why: str) -> None:
    with pytest.raises(MalformedBody, match=why):
        check_shape_now(body, LIMITS)


@pytest.mark.parametrize("size", [100, INLINE_BYTES + 1])
async def test_short_and_long_bodies_have_the_same_limits(size: int) -> None:
    with pytest.raises(MalformedBody, match="8 levels"):
        await check_shape(b"[" * 9 + b" " * size, LIMITS)
    await check_shape(b"[" * 8 + b" " * size, LIMITS)


async def test_a_body_that_is_too_deep_is_a_400() -> None:
    ingress = FakeIngress()
    nested: Any = []
    for _ in range(100):
        nested = [nested]
    call = await post(frontend(ingress).app, chat(vllm_xargs={"a": nested}))
    assert (call.status, call.error["code"]) == (400, "malformed_json")
    assert "64 levels" in call.error["message"]
    assert not ingress.jobs
