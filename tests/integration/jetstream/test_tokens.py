"""A nats-server in operator mode, and one that asks a service who a client is: the permissions are those of the accounts."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import nats
import pytest
from nats.aio.msg import Msg

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.errors import AccessDenied
from headrace.jetstream.logins.jwt_accounts import CREDENTIALS, SIGNING, SigningKey, operator_config, user_claims
from headrace.jetstream.logins.nkey_logins import write_context
from headrace.jetstream.logins.roles import PARTS_API, Login, Permissions, permissions
from headrace.jetstream.logins.steward import Steward
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.settings import ServerSettings
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import Topology, work_consumer
from tests.support.subject_patterns import allowed, api_calls, core_subjects

S = Subjects("hr")
TOPOLOGY = Topology(S)
LOGINS = [Login("operator"), Login("ingress"), Login("worker", "p"), Login("batch", "acme")]


def read_claims(token: str) -> dict[str, Any]:
    """Return what a token says, without a look at its signature."""
    body = token.split(".")[1]
    found: dict[str, Any] = json.loads(base64.urlsafe_b64decode(body + "=" * (-len(body) % 4)))
    return found


@asynccontextmanager
async def connected(folder: Path, login: Login) -> AsyncIterator[Connection]:
    options = ConnectOptions.from_context(str(folder / f"{login.name}.json"), name=login.name)
    async with await Connection.connect(options, subjects=S) as connection:
        yield connection


async def test_a_server_in_operator_mode_holds_users_to_the_lists_of_their_tokens(tmp_path: Path) -> None:
    folder = tmp_path / "logins"
    config = operator_config(TOPOLOGY, folder, LOGINS)
    with EmbeddedServer(tmp_path / "nats", ServerSettings(extra=config)) as server:
        for login in LOGINS:
            write_context(folder, login, url=server.url, prefix="hr", credentials=login.name + CREDENTIALS)
        with pytest.raises(AccessDenied):
            await Connection.connect(ConnectOptions(servers=(server.url,)), subjects=S)
        async with connected(folder, LOGINS[0]) as operator, TaskScope() as tasks:
            await ensure_topology(operator, TOPOLOGY)
            await Steward(operator, TOPOLOGY, tasks).start()
            for login in LOGINS[1:]:
                async with connected(folder, login) as part:
                    refused: set[str] = set()
                    part.core.on_permission_error = refused.add
                    subjects = [
                        *core_subjects(TOPOLOGY, "p", "acme"),
                        *core_subjects(TOPOLOGY, "q", "rival"),
                        *api_calls(TOPOLOGY),
                    ]
                    for subject in subjects:
                        part.send(subject, b"")
                    await part.barrier(10.0)
                    lists = permissions(TOPOLOGY, login).publish
                    wanted = {s for s in subjects if not allowed(lists, s)}
                    assert refused == {f'permissions violation for publish to "{s.lower()}"' for s in wanted}
            async with connected(folder, Login("worker", "p")) as worker:
                await worker.ensure_consumer(work_consumer(S, "p", "w1"))
                assert (await worker.publish(S.work("p", "w1"), b"work")).stream == "HR_WORK"
    assert not any(path.stat().st_mode & 0o077 for path in folder.rglob("*"))


async def test_signing_keys_stay_and_are_apart_from_what_parts_get(tmp_path: Path) -> None:
    operator_config(TOPOLOGY, tmp_path, LOGINS)
    signing = {path.name: path.read_text() for path in (tmp_path / SIGNING).iterdir()}
    assert set(signing) == {"operator.nk", "system.nk", "streams.nk", "parts.nk"}
    operator_config(TOPOLOGY, tmp_path, [*LOGINS, Login("batch", "rival")])
    assert signing == {path.name: path.read_text() for path in (tmp_path / SIGNING).iterdir()}
    assert (tmp_path / "batch-rival.creds").exists()
    token = (tmp_path / "worker-p.creds").read_text().splitlines()[1]
    assert read_claims(token)["nats"]["pub"]["allow"] == list(permissions(TOPOLOGY, Login("worker", "p")).publish)
    for path in tmp_path.glob("*.creds"):
        assert not any(seed.strip() in path.read_text() for seed in signing.values())


async def test_a_service_of_the_operators_own_says_who_a_client_is(tmp_path: Path) -> None:
    """The example of an auth callout in the documentation: a password of the operator's becomes a role's permissions."""
    issuer, streams = SigningKey.new("account"), TOPOLOGY.subjects.prefix.upper()
    lists = {"worker": permissions(TOPOLOGY, Login("worker", "p"))}
    config = f"""
accounts {{
  {streams}_PARTS: {{ users: [ {{ user: callout, password: of-the-service }} ] }}
  SYS: {{}}
}}
system_account: SYS
authorization {{
  auth_callout {{ issuer: {issuer.public}, auth_users: [ callout ], account: {streams}_PARTS }}
}}
"""
    with EmbeddedServer(tmp_path / "nats", ServerSettings(extra=config)) as server:
        service = await nats.connect(server.url, user="callout", password="of-the-service")

        async def decide(message: Msg) -> None:
            asked = read_claims(message.data.decode())
            request = asked["nats"]
            given = request["connect_opts"]
            known: Permissions | None = lists.get(given.get("user", "")) if given.get("pass") == "right" else None
            answer = {"type": "authorization_response"}
            if known is None:
                answer["error"] = "unknown"
            else:
                claims = user_claims(known)
                answer["jwt"] = issuer.sign(
                    request["user_nkey"], given["user"], claims, life_s=3600, audience=f"{streams}_PARTS"
                )
            told = issuer.sign(request["user_nkey"], "answer", answer, audience=request["server_id"]["id"])
            await message.respond(told.encode())

        await service.subscribe("$SYS.REQ.USER.AUTH", cb=decide)
        try:
            worker = await nats.connect(server.url, user="worker", password="right", inbox_prefix="_INBOX.worker.p")
            refused: list[str] = []

            async def on_error(error: Exception) -> None:
                refused.append(str(error))

            worker._error_cb = on_error
            own = S.spoken_by("p", "w1")
            await worker.publish(own.out("i1"), b"a frame")
            await worker.publish(own.judge("i1"), b"a question")
            await worker.flush()
            assert not refused
            for subject in (S.work("q", "w9"), f"{PARTS_API}.STREAM.PURGE.HR_REQ", S.cancel_jobs()):
                await worker.publish(subject, b"")
            async with asyncio.timeout(10):
                while len(refused) < 3:
                    await asyncio.sleep(0.02)
            await worker.close()
            options = ConnectOptions(servers=(server.url,), user="worker", password="wrong")
            with pytest.raises(AccessDenied):
                await Connection.connect(options, subjects=S)
        finally:
            await service.close()
