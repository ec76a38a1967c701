"""Trying again until it works."""

from __future__ import annotations

from typing import Any

import pytest
from structlog.testing import capture_logs

from headrace.broker.codec import decode, encode
from headrace.broker.dead_letters import FailedDeliveries, until_done
from headrace.broker.messages.control import Refuse
from headrace.broker.messages.durable import DeadLetter, Unreadable
from headrace.jetstream.errors import JetStreamError, PayloadTooLarge
from headrace.jetstream.subjects import Subjects
from tests.support import poison
from tests.support.ingress_parts import Messages


class Attempts:
    """The first `failures` fail."""

    def __init__(self, failures: int, error: type[Exception] = JetStreamError) -> None:
        self.left, self.error, self.made = failures, error, 0

    async def __call__(self) -> None:
        self.made += 1
        if self.left:
            self.left -= 1
            raise self.error("no answer")


async def test_it_is_tried_until_it_works_and_each_failure_is_logged() -> None:
    attempts = Attempts(2)
    with capture_logs() as logs:
        await until_done(attempts, event="thing.retry", retry_s=0.0, worker="w")
    assert attempts.made == 3
    assert [(log["event"], log["worker"], log["error"]) for log in logs] == [("thing.retry", "w", "no answer")] * 2


async def test_what_is_not_wanted_any_more_is_not_tried_again() -> None:
    attempts = Attempts(9)
    await until_done(attempts, event="thing.retry", retry_s=0.0, wanted=lambda: attempts.made < 2)
    assert attempts.made == 2


async def test_other_errors_are_the_callers() -> None:
    with pytest.raises(ValueError, match="no answer"):
        await until_done(Attempts(1, ValueError), event="thing.retry", retry_s=0.0)


class Delivery:
    subject = "hr.req.p.std.x"
    stream_seq = 7
    headers: dict[str, str] = {}

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.acked = 0

    def ack(self) -> None:
        self.acked += 1


class Small(Messages):
    """A server that takes no message of this size."""

    def send(self, subject: str, data: bytes) -> None:
        if len(data) > 100_000:
            raise PayloadTooLarge(subject)
        super().send(subject, data)


def failures(messages: Messages) -> FailedDeliveries:
    return FailedDeliveries(messages, Subjects("hr"), pool="p", kind="request", wall=lambda: 5.0)  # type: ignore[arg-type]


async def test_a_request_becomes_a_dead_letter_and_its_judge_ends_it() -> None:
    messages, delivery, asked = Messages(), Delivery(encode(poison.envelope("p", judge="j"))), []

    def handler(_delivery: Any) -> None:
        raise ZeroDivisionError("the secret prompt")

    failures(messages).guard(handler, after=lambda: asked.append(1))(delivery)  # type: ignore[arg-type]
    refusal, letter = (data for _, data in messages.sent)
    assert [subject for subject, _ in messages.sent] == ["hr.judge.j", "hr.dlq.p"]
    assert decode(DeadLetter, letter).reason == "failed: ZeroDivisionError: the secret prompt"
    told = decode(Refuse, refusal)
    assert (told.fault.code, told.attempt) == ("engine_error", 1)
    assert "secret" not in told.fault.message
    assert (delivery.acked, asked) == (1, [1])


async def test_what_is_no_request_is_kept_as_bytes() -> None:
    messages, delivery = Messages(), Delivery(b"rubbish")
    failures(messages).bury(delivery, ValueError("no"))  # type: ignore[arg-type]
    assert decode(Unreadable, messages.sent[0][1]).data == b"rubbish"
    assert delivery.acked == 1


async def test_a_request_that_leaves_no_room_for_a_letter_is_kept_in_part() -> None:
    messages = Small()
    delivery = Delivery(encode(poison.envelope("p", judge="j", payload=b"x" * 100_000)))
    failures(messages).bury(delivery, ValueError("no" * 150))  # type: ignore[arg-type]
    letter = decode(Unreadable, messages.sent[-1][1])
    assert (len(letter.data), delivery.acked) == (64 * 1024, 1)
