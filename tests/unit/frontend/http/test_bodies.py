"""The shape of a body is known before anything is built from it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.frontend.errors import BodiesFull, MalformedBody
from headrace.frontend.http.bodies import FREE_BYTES, BodyBudget, check_shape_now
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import FakeIngress, chat, frontend, post

LIMITS = FrontendSettings(max_json_depth=8, max_json_containers=50, max_json_values=100)


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


async def test_a_body_that_is_too_deep_is_a_400() -> None:
    ingress = FakeIngress()
    nested: Any = []
    for _ in range(100):
        nested = [nested]
    call = await post(frontend(ingress).app, chat(vllm_xargs={"a": nested}))
    assert (call.status, call.error["code"]) == (400, "malformed_json")
    assert "64 levels" in call.error["message"]
    assert not ingress.jobs


def test_a_body_gives_back_all_that_it_held_however_it_ended() -> None:
    seen: list[float] = []
    budget = BodyBudget(1000, seen.append)
    share = budget.share("a")
    share.add(FREE_BYTES)
    assert budget.held == 0, "the first bytes of a body are free"
    share.add(300)
    share.add(100)
    assert budget.held == 400
    share.close()
    share.close()
    assert (budget.held, seen) == (0, [300, 400, 0])


def test_an_address_gets_half_and_all_together_get_the_budget() -> None:
    budget = BodyBudget(1000)
    shares = {peer: budget.share(peer) for peer in "abc"}
    for share in shares.values():
        share.add(FREE_BYTES)
    shares["a"].add(500)
    with pytest.raises(BodiesFull, match="this address"):
        budget.share("a").add(FREE_BYTES + 1)
    shares["b"].add(500)
    with pytest.raises(BodiesFull, match="1000 of 1000") as caught:
        shares["c"].add(1)
    assert (caught.value.status, caught.value.retry_after_s) == (503, 1.0)
    shares["a"].close()
    shares["c"].add(1)
