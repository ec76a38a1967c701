"""Calls of the JetStream API while a cluster elects who answers them."""

from __future__ import annotations

import json
from typing import Any

import pytest

from headrace.jetstream.api import ApiError, JsApi

NOBODY = {"error": {"code": 503, "err_code": 10008, "description": "JetStream system temporarily unavailable"}}
NO_PEERS = {"error": {"code": 400, "err_code": 10005, "description": "no suitable peers for placement"}}


class Server:
    """Gives these answers, the last one again and again."""

    def __init__(self, *answers: dict[str, Any]) -> None:
        self.answers = list(answers)
        self.asked: list[tuple[str, bool]] = []

    async def request(self, subject: str, data: bytes, *, timeout_s: float, repeated: bool = False) -> bytes:
        self.asked.append((subject, repeated))
        return json.dumps(self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]).encode()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.jetstream.api.ASK_AGAIN_S", 0.01)


@pytest.mark.parametrize(
    "call",
    [
        "STREAM.INFO.S",
        "STREAM.PURGE.S",
        "STREAM.MSG.GET.S",
        "STREAM.MSG.DELETE.S",
        "CONSUMER.CREATE.S.c.a",
        "CONSUMER.DELETE.S.c",
        "CONSUMER.LIST.S",
    ],
)
async def test_a_call_that_nobody_leads_is_made_again_until_somebody_does(call: str) -> None:
    server = Server(NOBODY, NOBODY, {"success": True})
    assert await JsApi(server).call(call) == {"success": True}
    assert len(server.asked) == 3


async def test_a_call_that_nobody_leads_in_its_time_is_an_error_that_may_be_tried_again() -> None:
    server = Server(NOBODY)
    with pytest.raises(ApiError, match="10008") as raised:
        await JsApi(server).call("STREAM.INFO.S", timeout_s=0.05)
    assert raised.value.retriable
    assert len(server.asked) > 1


async def test_other_refusals_are_told_at_once() -> None:
    server = Server(NO_PEERS)
    with pytest.raises(ApiError):
        await JsApi(server).call("STREAM.CREATE.S")
    assert len(server.asked) == 1


@pytest.mark.parametrize(
    ("call", "repeated"),
    [
        ("STREAM.INFO.S", True),
        ("STREAM.MSG.GET.S", True),
        ("CONSUMER.CREATE.S.c.a", True),
        ("INFO", True),
        ("STREAM.MSG.DELETE.S", False),
        ("STREAM.PURGE.S", False),
        ("CONSUMER.DELETE.S.c", False),
        ("STREAM.CREATE.S", False),
        ("STREAM.LEADER.STEPDOWN.S", False),
    ],
)
async def test_only_calls_that_may_be_made_twice_are_sent_again_without_an_answer(call: str, repeated: bool) -> None:
    server = Server({})
    await JsApi(server).call(call)
    assert server.asked == [(f"$JS.API.{call}", repeated)]
