"""The client with the login of a tenant: results are found by the event of their end, and without it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import NamedTuple

import msgspec
import pytest
import pytest_asyncio

from headrace.broker.messages.durable import JobProgress
from headrace.client import Client, ClientError, ClientOptions, NotAllowed, connect
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.logins.nkey_logins import accounts_config, make_keys, write_context
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.support.job_stand_in import carrying

S = Subjects("hr")
BODY = {"model": "m", "messages": [{"role": "user", "content": "abc"}]}


class Deployed(NamedTuple):
    operator: Connection
    client: Client


@pytest_asyncio.fixture
async def deployed(tmp_path: Path) -> AsyncIterator[Deployed]:
    logins, folder, topology = [Login("operator"), Login("batch", "acme")], tmp_path / "logins", Topology(S)
    config = accounts_config(topology, make_keys(folder, logins))
    with EmbeddedServer(tmp_path / "nats", ServerSettings(extra=config)) as server:
        contexts = [write_context(folder, login, url=server.url, prefix="hr") for login in logins]
        options = [ConnectOptions.from_context(str(path)) for path in contexts]
        async with await Connection.connect(options[0], subjects=S) as operator:
            await ensure_topology(operator, topology)
            async with connect(options=ClientOptions(nats=options[1])) as client:
                yield Deployed(operator, client)


async def test_a_result_is_found_although_its_end_was_never_told(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client.results.LOOK_AGAIN_S", 0.1)
    async with carrying(deployed.operator, S, "m"):  # it tells nothing
        job = await deployed.client.submit(BODY)
        assert (await job.result(timeout_s=30)).text == "cba"


async def test_a_result_is_read_as_soon_as_its_end_is_told(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client.results.LOOK_AGAIN_S", 600.0)
    job = await deployed.client.submit(BODY, id="one")
    waiting = asyncio.ensure_future(job.result(timeout_s=60))
    await asyncio.sleep(0.3)  # it has looked once, in vain
    deployed.operator.send(S.job_events("acme", "one"), b"no event")
    async with carrying(deployed.operator, S, "m"):
        while await deployed.client.peek("one") is None:
            await asyncio.sleep(0.02)
    assert not waiting.done()
    told = JobProgress(id="one", event="finished", status="done")
    deployed.operator.send(S.job_events("acme", "one"), msgspec.json.encode(told))
    assert (await waiting).text == "cba"


async def test_a_result_that_no_message_holds_says_who_can_read_it(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.client.results.LOOK_AGAIN_S", 0.1)
    async with carrying(deployed.operator, S, "m", large=True):
        job = await deployed.client.submit(BODY)
        with pytest.raises(ClientError, match="more than a message holds"):
            await job.result(timeout_s=30)


async def test_the_login_of_a_tenant_speaks_for_no_other_one(deployed: Deployed) -> None:
    nats = deployed.client.messaging.options  # type: ignore[attr-defined]  # it is a Connection
    async with connect(options=ClientOptions(nats=nats, tenant="acme")) as same:
        assert same.tenant == "acme"
    with pytest.raises(NotAllowed, match="cannot speak for 'rival'"):
        async with connect(options=ClientOptions(nats=nats, tenant="rival")):
            pass
