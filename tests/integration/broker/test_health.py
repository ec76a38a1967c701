"""Whether a broker that is connected can be used, against a real nats-server; and a port that is open before it can."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from unittest import mock

import pytest

from headrace.broker.batches.settings import BatchSettings
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.models.directory import publish_card
from headrace.frontend.generation.endpoint import Lifecycle
from headrace.frontend.metrics import Metrics
from headrace.frontend.server import _Work
from headrace.frontend.settings import FrontendSettings
from headrace.frontend.status import StartupApp
from headrace.jetstream import client
from headrace.jetstream.client import Connection, ConnectOptions, connect_patiently
from headrace.jetstream.errors import AccessDenied, DiskFull, JetStreamDisabled, PublishUnknown, ServerUnreachable
from headrace.jetstream.health import BrokerHealth
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.workers import registration
from tests.integration.broker.test_job_path import CARD, ingress, job, worker
from tests.support.frontend.fakes import Call


async def until(met: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not met():
            await asyncio.sleep(0.01)


async def test_deleted_streams_are_named_and_reported_once_they_are_back(connection: Connection, subjects: Subjects) -> None:
    topology = Topology(subjects)
    mended: list[frozenset[str]] = []
    standing = BrokerHealth(connection, topology, look_s=0.05, on_mended=mended.append)
    running = asyncio.create_task(standing.run())
    for name in ("LOAD", "REQ"):
        await connection.api.call(f"STREAM.DELETE.{subjects.stream(name)}")
    await until(lambda: standing.trouble)
    assert subjects.stream("REQ") in standing.trouble
    assert "headrace streams apply" in standing.trouble
    assert subjects.stream("LOAD") not in standing.trouble, "one in memory had nothing to lose and is made again at once"
    await connection.api.call(f"STREAM.INFO.{subjects.stream('LOAD')}")
    await ensure_topology(connection, topology)
    await until(lambda: not standing.trouble)
    assert mended == [frozenset({subjects.stream("REQ")})]
    running.cancel()


async def test_a_failed_write_is_trouble_until_one_of_its_own_is_stored(connection: Connection, subjects: Subjects) -> None:
    standing = BrokerHealth(connection, Topology(subjects), probe=True, look_s=0.05)
    standing.failed(PublishUnknown("no word"))
    assert "does not store" in standing.trouble
    running = asyncio.create_task(standing.run())
    await until(lambda: not standing.trouble)
    assert (await connection.stream_state(subjects.stream("REQ"))).messages == 0, "its own message is gone again"
    running.cancel()


async def test_without_probing_the_next_request_that_is_stored_ends_the_trouble(
    connection: Connection, subjects: Subjects
) -> None:
    standing = BrokerHealth(connection, Topology(subjects), look_s=0.02)
    standing.failed(DiskFull("full"))
    running = asyncio.create_task(standing.run())
    await asyncio.sleep(0.1)
    assert standing.trouble
    standing.stored()
    await until(lambda: not standing.trouble)
    running.cancel()


async def test_open_requests_are_submitted_again_when_what_was_stored_of_them_is_gone(
    connection: Connection, subjects: Subjects
) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1") as session:
        await until(served.models.ready_names)
        await session.intake.stop()
        stream = await served.submit(job(5))
        await connection.purge_stream(subjects.stream("REQ"))
        served.resubmit()
        async with asyncio.timeout(5):
            while not (await connection.stream_state(subjects.stream("MOVED"))).messages:
                await asyncio.sleep(0.02)
        stream.cancel()


async def test_any_ingress_cancels_the_request_of_another_one_for_its_tenant_only(
    connection: Connection, subjects: Subjects
) -> None:
    async with ingress(connection, subjects) as served, worker(connection, subjects, "w1", step_s=0.01) as session:
        await until(served.models.ready_names)
        other = Ingress(connection, subjects)
        async with asyncio.TaskGroup() as tasks:
            running = tasks.create_task(other.run())
            await other.wait_started(10)
            stream = await served.submit(job(100_000, name="mine", tenant="acme"))
            await stream.rows()
            assert not await other.cancel("mine", "_", timeout_s=2.0)
            assert not await other.cancel("yours", "acme", timeout_s=2.0)
            assert await other.cancel("mine", "acme", timeout_s=2.0)
            await until(lambda: not len(session.runs.table))
            assert not await other.cancel("mine", "acme", timeout_s=2.0), "it has ended"
            running.cancel()


class Server:
    """Fails as it is told to, then takes the connection."""

    def __init__(self, *errors: Exception) -> None:
        self.errors = list(errors)
        self.tries = 0

    async def connect(self, options: ConnectOptions, *, subjects: Subjects) -> str:
        self.tries += 1
        if self.errors:
            raise self.errors.pop(0)
        return "connected"


@pytest.mark.parametrize(
    ("errors", "ends"),
    [
        ([ServerUnreachable(), JetStreamDisabled(), JetStreamDisabled(), AccessDenied(), AccessDenied()], None),
        ([AccessDenied()], AccessDenied),
        ([JetStreamDisabled(), *([AccessDenied()] * 9)], AccessDenied),
        ([*([ServerUnreachable()] * 99)], ServerUnreachable),
    ],
    ids=["patient", "denied", "denied for long", "never there"],
)
async def test_who_waits_for_a_server_gives_up_only_what_is_in_vain(
    errors: list[Exception], ends: type[Exception] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = Server(*errors)
    reasons: list[str] = []
    monkeypatch.setattr(client, "RETRY_S", 0.005)
    monkeypatch.setattr(client, "Connection", server)
    wait = connect_patiently(
        ConnectOptions(servers=("nats://x:1",)), subjects=Subjects(), timeout_s=0.1, on_waiting=reasons.append
    )
    if ends is None:
        assert await wait == "connected"  # type: ignore[comparison-overlap]
        assert len(reasons) == len(errors)
    else:
        with pytest.raises(ends):
            await wait


@pytest.mark.parametrize(
    ("path", "status", "words"),
    [
        ("/live", 200, "alive"),
        ("/ready", 503, "no JetStream"),
        ("/health", 503, "no JetStream"),
        ("/v1/chat/completions", 503, "broker_unavailable"),
        ("/metrics", 200, "headrace_frontend_requests_in_flight"),
    ],
)
async def test_a_port_without_a_broker_says_so(path: str, status: int, words: str) -> None:
    door = StartupApp(Metrics(), Lifecycle())
    door.waiting("no JetStream")
    call = await Call(door, path, method="GET").run()
    assert call.status == status
    assert words in call.body.decode()
    assert (call.headers.get("retry-after") is not None) is (path == "/v1/chat/completions")


async def test_a_door_that_is_open_lets_everything_through() -> None:
    door = StartupApp(Metrics(), Lifecycle())
    seen: list[str] = []

    async def app(scope, receive, send) -> None:  # type: ignore[no-untyped-def]
        seen.append(scope["path"])

    door.open(app)
    await Call(door, "/ready", method="GET").run()
    assert seen == ["/ready"]


@pytest.mark.parametrize("lost", ["card", "files"])
async def test_a_card_that_the_broker_lost_is_stored_again(
    lost: str, connection: Connection, subjects: Subjects, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registration, "CHECK_S", 0.02)
    files = {"tokenizer.json": b"{}"}
    await publish_card(connection, subjects, CARD, files)
    cards, stream = connection.bucket(subjects.bucket("models")), f"OBJ_{subjects.bucket('models')}"
    if lost == "card":
        await cards.delete(CARD.pool)
    else:
        await connection.purge_stream(stream)
    keeping = asyncio.create_task(registration.CardKeeper(connection, subjects, CARD, files).run())
    async with asyncio.timeout(5):
        while await cards.get(CARD.pool) is None or not (await connection.stream_state(stream)).messages:
            await asyncio.sleep(0.02)
    keeping.cancel()


@pytest.mark.parametrize(("back", "times"), [({"HR_REQ"}, 1), ({"HR_MOVED", "HR_WORK"}, 1), ({"KV_hr_models", "HR_LOAD"}, 0)])
def test_only_queues_that_were_lost_make_a_frontend_submit_again(back: set[str], times: int) -> None:
    ingress = mock.Mock()
    options, front = ConnectOptions(servers=("nats://x:1",)), StartupApp(Metrics(), Lifecycle())
    work = _Work(FrontendSettings(), BatchSettings(), options, Subjects(), front)
    work._ingress = ingress
    work._on_mended(frozenset(back))
    assert ingress.resubmit.call_count == times
