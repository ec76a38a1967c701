"""Publishing jobs: what is confirmed is stored under its name, and every other outcome is an error that says which."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from headrace.broker.durable.publisher import PUBLISH_TRIES, JobPublisher, NewJob
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.errors import BrokerUnavailable, Overloaded, RequestTooLarge
from headrace.jetstream.errors import NotConnected, PayloadTooLarge, PublishUnknown, QueueFull
from headrace.jetstream.ports import PubAck
from headrace.jetstream.subjects import Subjects

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
