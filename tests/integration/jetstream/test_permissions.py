"""Each role at a real nats-server: what its allow-lists have is let through, everything else is refused."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import nats
import pytest

from headrace.broker.errors import ResponseUnknown
from headrace.broker.ingress.response_store import RecordIndex, ResponseStore, StoredResponse
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer, find_binary
from headrace.jetstream.errors import TopologyError
from headrace.jetstream.logins.nkey_logins import accounts_config, make_keys, write_context
from headrace.jetstream.logins.roles import PARTS_API, ROLES, Login, permissions
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.support.subject_patterns import (
    CONSUMER_CALLS,
    PLAIN_CALLS,
    STREAM_CALLS,
    allowed,
    api_calls,
    core_subjects,
    inboxes_of_all,
    stored_subjects,
)

TOPOLOGY = Topology(Subjects("hr"))
OWN, OTHER = "pool-a", "pool-b"
LOGINS = [Login(role, "acme" if role == "batch" else OWN if role in ("worker", "router") else "") for role in ROLES]
SUBJECTS = sorted(
    {
        *(s for pool in (OWN, OTHER) for tenant in ("acme", "rival") for s in core_subjects(TOPOLOGY, pool, tenant)),
        *(s for pool in (OWN, OTHER) for s in stored_subjects(TOPOLOGY, pool)),
        *api_calls(TOPOLOGY),
        *api_calls(TOPOLOGY, "$JS.API"),
        *(login.steward("hr") for login in LOGINS),
        *inboxes_of_all(),
        "$SYS.REQ.SERVER.PING",
        "$JS.EVENT.ADVISORY.CONSUMER.MAX_DELIVERIES.HR_REQ.c1",
    }
)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[EmbeddedServer, Path]]:
    """A server with a user for each role, and the folder with their contexts."""
    folder = tmp_path_factory.mktemp("guarded")
    logins = [*LOGINS, Login("worker", OTHER)]
    config = accounts_config(TOPOLOGY, make_keys(folder / "logins", logins))
    with EmbeddedServer(folder / "nats", ServerSettings(extra=config)) as server:
        for login in logins:
            write_context(folder / "logins", login, url=server.url, prefix="hr")
        yield server, folder / "logins"


async def logged_in(folder: Path, login: Login) -> Connection:
    options = ConnectOptions.from_context(str(folder / f"{login.name}.json"), name=login.name)
    return await Connection.connect(options, subjects=TOPOLOGY.subjects)


@pytest.mark.parametrize("login", LOGINS, ids=lambda login: login.name)
async def test_the_server_refuses_a_role_what_is_not_in_its_lists(guarded: tuple[EmbeddedServer, Path], login: Login) -> None:
    _, folder = guarded
    lists = permissions(TOPOLOGY, login)
    async with await logged_in(folder, login) as connection:
        refused: set[str] = set()
        connection.core.on_permission_error = refused.add
        for subject in SUBJECTS:
            connection.send(subject, b"")
        await connection.barrier(10.0)
        expected = {f'permissions violation for publish to "{s.lower()}"' for s in SUBJECTS if not allowed(lists.publish, s)}
        assert refused == expected
        assert len(SUBJECTS) > 1000
        refused.clear()
        heard = [s for s in SUBJECTS if not s.startswith(("$JS.API.", PARTS_API))]
        for subject in heard:
            await connection.subscribe(subject, lambda _message: None)
        await connection.barrier(10.0)
        expected = {
            f'permissions violation for subscription to "{s.lower()}"' for s in heard if not allowed(lists.subscribe, s)
        }
        assert refused == expected


def test_every_call_that_this_server_knows_is_tried() -> None:
    """The subjects that it listens on stand in its program, each with the beginning of some other text behind it."""
    program = find_binary().read_bytes()
    found = {one.decode() for one in re.findall(rb"\$JS\.API\.([A-Z_]+(?:\.[A-Z_]+)*)", program)}
    known = [call.removesuffix(".x").removesuffix(".x") for call in (*STREAM_CALLS, *CONSUMER_CALLS, *PLAIN_CALLS)]
    roots = {call.rpartition(".")[0] for call in known} | {"DIRECT"}
    unknown = {call for call in found if len(call) > 2 and call not in roots and not call.startswith(tuple(known))}
    assert unknown == set()
    assert {call for call in known if not any(one.startswith(call) for one in found)} == set(), "the server has no such call"


async def test_nobody_hears_more_by_a_wildcard(guarded: tuple[EmbeddedServer, Path]) -> None:
    _, folder = guarded
    for login in LOGINS:
        if login.role == "operator":
            continue
        async with await logged_in(folder, login) as connection:
            refused: set[str] = set()
            connection.core.on_permission_error = refused.add
            wanted = [">", "hr.>", "hr.req.>", "$KV.>", "$JS.>", "_INBOX.>", "$SYS.>"]
            for subject in wanted:
                await connection.subscribe(subject, lambda _message: None)
            await connection.barrier()
            assert len(refused) == len(wanted), (login.name, refused)


async def test_a_part_finds_its_streams_and_is_told_when_it_may_not_make_them(
    guarded: tuple[EmbeddedServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = guarded
    async with await logged_in(folder, Login("operator")) as operator, await logged_in(folder, Login("ingress")) as ingress:
        await ensure_topology(operator, TOPOLOGY)
        await ensure_topology(ingress, TOPOLOGY)
        await operator.api.call("STREAM.DELETE.HR_LOAD")
        monkeypatch.setattr("headrace.jetstream.provision.OPERATOR_S", 0.1)
        with pytest.raises(TopologyError, match="HR_LOAD is missing or differs, and this login may not change it"):
            await ensure_topology(ingress, TOPOLOGY)
        await ensure_topology(operator, TOPOLOGY)
        await ensure_topology(ingress, TOPOLOGY)


async def test_an_ingress_may_make_room_in_the_stores_of_answers_and_records(
    guarded: tuple[EmbeddedServer, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, folder = guarded
    for part in ("NEAR", "FULL"):  # a few kilobytes
        monkeypatch.setattr(f"headrace.broker.ingress.response_store.{part}", 2e-5)
    async with await logged_in(folder, Login("operator")) as operator, await logged_in(folder, Login("ingress")) as ingress:
        await ensure_topology(operator, TOPOLOGY)
        store = ResponseStore(ingress, TOPOLOGY.subjects)
        index = RecordIndex(ingress, TOPOLOGY.subjects, ttl_s=60.0)
        for number in range(6):
            await store.put(StoredResponse(id=f"resp_{number}", tenant="acme", answer=bytes(10_000)))
            await index.put("chat", "acme", str(number), bytes(1000))
        assert (await store.get("resp_5", "acme")).id == "resp_5"
        with pytest.raises(ResponseUnknown):
            await store.get("resp_0", "acme")
        assert 1 <= len(await index.list("chat", "acme")) < 6


@pytest.mark.parametrize("responses", [False, True])
async def test_response_permissions_would_let_a_login_write_anywhere(tmp_path: Path, responses: bool) -> None:
    """Which is why no login has them: it names the subject as the reply of a message to itself, and may then publish there."""
    lists = 'publish: { allow: ["mine"] }, subscribe: { allow: ["mine"] }' + (", allow_responses: true" if responses else "")
    users = f"{{ user: a, password: a, permissions: {{ {lists} }} }}, {{ user: b, password: b }}"
    with EmbeddedServer(tmp_path, ServerSettings(extra=f"authorization {{ users: [ {users} ] }}\n")) as server:
        limited = await nats.connect(server.url, user="a", password="a")
        other = await nats.connect(server.url, user="b", password="b")
        try:
            heard = await other.subscribe("theirs")
            await limited.subscribe("mine")
            await other.flush()
            await limited.publish("mine", b"", reply="theirs")
            await limited.flush()
            await limited.publish("theirs", b"written")
            await limited.flush()
            await other.publish("theirs", b"last")
            assert (await heard.next_msg(5.0)).data == (b"written" if responses else b"last")
        finally:
            await limited.close()
            await other.close()
