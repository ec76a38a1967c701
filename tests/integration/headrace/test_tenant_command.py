"""`headrace tenant` on a real nats-server that holds data of two tenants: one goes, not a byte of the other is touched."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from headrace.broker.batches.record import BatchRecord
from headrace.broker.batches.store import BatchStore
from headrace.broker.codec import decode, encode
from headrace.broker.durable.results import ResultStore
from headrace.broker.durable.stored_jobs import RequestDigests
from headrace.broker.files.store import FileDraft, FileStore
from headrace.broker.ingress.response_store import RecordIndex, ResponseStore, StoredResponse
from headrace.broker.keys import KeyRecord, KeyStore, UsageCounters
from headrace.broker.messages.control import Routed
from headrace.broker.messages.durable import DeadLetter, JobResult, ResultResponse, Unreadable
from headrace.broker.messages.events import Cancel
from headrace.broker.messages.operator import AuditRecord, OperatorAct
from headrace.broker.messages.requests import Envelope, Spill
from headrace.broker.tenants import KINDS, TenantErasure, TenantInventory
from headrace.cli import main
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.subjects import Subjects, tenant_owner
from headrace.jetstream.topology import AUDIT, Topology

Command = Callable[..., Awaitable[int]]
Stored = set[tuple[str, str, int, bytes]]
SECRET = "a secret of "


@pytest.fixture
def command(nats_server: EmbeddedServer, subjects: Subjects) -> Command:
    async def run(*words: str) -> int:
        return await asyncio.to_thread(main, ["tenant", *words, "--nats", nats_server.url, "--prefix", subjects.prefix])

    return run


async def store_all(connection: Connection, subjects: Subjects, tenant: str) -> None:
    """Store one of each kind for a tenant, through what the deployment itself stores it with."""
    secret = f"{SECRET}{tenant}"
    wish = KeyRecord(id="", name=f"{tenant}-key", tenant=tenant, hashes=[], scopes=["generate"], created=0.0)
    await KeyStore(connection, subjects).create(wish)
    batch = BatchRecord(
        id=f"batch_{tenant}{'0' * 20}",
        tenant=tenant,
        endpoint="/v1/chat/completions",
        input_file_id="file-x",
        completion_window="24h",
        created=1.0,
        expires_at=2,
        metadata={"note": secret},
    )
    await BatchStore(connection, subjects, keep_s=60.0).create(batch)

    async def content() -> AsyncIterator[bytes]:
        yield secret.encode() * 30_000  # several chunks

    await FileStore(connection, subjects).create(FileDraft(tenant=tenant, filename="f.jsonl", purpose="batch"), content())
    files = connection.bucket(subjects.bucket("files"))
    await files.put(f"upload.{tenant}.upload_{tenant}", msgspec.json.encode({"tenant": tenant}))
    await files.put(f"part.{tenant}.upload_{tenant}.part_1", msgspec.json.encode({"tenant": tenant}))
    await RecordIndex(connection, subjects, ttl_s=600.0).put("chat", tenant, "c1", msgspec.json.encode({"about": secret}))
    answer = msgspec.json.encode({"output": secret})
    await ResponseStore(connection, subjects).put(StoredResponse(id=f"resp_{tenant}", tenant=tenant, answer=answer))
    body = {"model": "m", "messages": [{"role": "user", "content": secret}]}
    await connection.publish(subjects.job("m", tenant), msgspec.json.encode(body), headers={"Hr-Job": "j1"})
    await RequestDigests(connection, subjects).claim(tenant, "j1", "of the request")
    await connection.publish(subjects.rsp(tenant, "j1"), msgspec.msgpack.encode({"rows": secret}))
    response = ResultResponse(status_code=200, request_id="r", body=msgspec.Raw(msgspec.json.encode({"text": secret})))
    small = JobResult(id="j1", status="done", response=response)
    await ResultStore(connection, subjects).commit(tenant, "j1", small)
    await ResultStore(connection, subjects, largest=1).commit(tenant, "j2", small)
    await UsageCounters(connection, subjects).add(tenant_owner(tenant), "tokens", 7, 100)
    await connection.objects(subjects.bucket("spill")).put(f"spill-{tenant}", secret.encode())
    envelope = Envelope(
        id=f"r-{tenant}",
        pool="p",
        model="m",
        judge="i1",
        deadline=time.time() + 600,
        created=1.0,
        tokens=1,
        tenant=tenant,
        spill=Spill(object=f"spill-{tenant}", size=1, digest="0"),
    )
    await connection.publish(subjects.req("p", "std", tenant), encode(envelope))
    await connection.publish(subjects.req("p", "re", tenant), encode(envelope))
    letter = DeadLetter(envelope=envelope, reason="poison", attempt=1, history=[], at=1.0)
    await connection.publish(subjects.dlq("p"), encode(letter))
    broken = Unreadable(subject=subjects.req("p", "std", tenant), why="broken", data=secret.encode(), at=1.0)
    await connection.publish(subjects.dlq("p"), encode(broken))
    await connection.publish(subjects.dlq("p"), f"no letter, and no word of {SECRET}".encode())
    await ensure_on_demand(connection, Topology(subjects).audit())
    asked = AuditRecord(at=1.0, id=f"r-{tenant}", frontend="i", route="/v1/completions", tenant=tenant, request=secret)
    await connection.publish(subjects.audit_record(tenant), encode(asked))
    placed = Routed(at=1.0, id=f"r-{tenant}", worker="w", tokens=1, tenant=tenant)
    connection.send(subjects.route("p"), encode(placed))
    await connection.barrier()


async def all_stored(connection: Connection, subjects: Subjects) -> Stored:
    found: Stored = set()
    for spec in Topology(subjects).all_streams():
        if spec.on_demand and spec.name != subjects.stream(AUDIT):
            continue
        for message in await connection.subject_messages(spec.name, ">", limit=100_000):
            found.add((spec.name, message.subject, message.seq, message.data))
    return found


def of(tenant: str, stored: Stored) -> Stored:
    """What names the tenant in its subject or its data. The names of objects are in subjects as base64, and in their data."""
    return {one for one in stored if tenant in one[1] or tenant.encode() in one[3]}


async def test_a_deleted_tenant_is_gone_and_not_a_byte_of_another_one(
    connection: Connection, subjects: Subjects, command: Command
) -> None:
    for tenant in ("acme", "rival", "acme2"):
        await store_all(connection, subjects, tenant)
    before = await all_stored(connection, subjects)
    counts = await TenantInventory(connection, subjects, "acme").counts()
    assert set(counts) == set(KINDS)
    assert await command("delete", "acme") == 0
    assert await all_stored(connection, subjects) == before  # it only said what it would delete
    cancelled: list[Any] = []
    await connection.subscribe(subjects.cancel_jobs(), lambda message: cancelled.append(decode(Cancel, message.data)))
    await connection.barrier()

    assert await command("delete", "acme", "--yes") == 0
    after = await all_stored(connection, subjects)
    rest = {one for one in of("acme", after) - of("acme2", after) if not one[0].startswith("KV_")}
    assert not rest
    keys = await KeyStore(connection, subjects).all()
    assert {(key.tenant, bool(key.revoked)) for key in keys} == {("acme", True), ("rival", False), ("acme2", False)}
    assert SECRET + "acme" not in str(after).replace(SECRET + "acme2", "")
    theirs = of("rival", before) | of("acme2", before)
    assert theirs <= after
    assert len(theirs) > 2 * len(KINDS)
    assert len(cancelled) == 1
    assert len(cancelled[0].ids) == 1

    assert await command("delete", "acme", "--yes") == 0  # again: there is nothing to do
    assert theirs <= await all_stored(connection, subjects)
    assert await TenantInventory(connection, subjects, "acme").counts() == {}


async def test_a_delete_that_was_interrupted_is_finished_by_the_next(
    connection: Connection, subjects: Subjects, command: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store_all(connection, subjects, "acme")
    erase, done = TenantErasure._erase_object, []

    async def erase_two(self: TenantErasure, bucket: str, name: str) -> None:
        if len(done) == 2:
            raise asyncio.CancelledError
        done.append(name)
        await erase(self, bucket, name)

    monkeypatch.setattr(TenantErasure, "_erase_object", erase_two)
    with pytest.raises(asyncio.CancelledError):
        await TenantErasure(TenantInventory(connection, subjects, "acme")).run()
    left = await TenantInventory(connection, subjects, "acme").counts()
    assert left
    assert "keys" not in left  # revoked before anything else
    monkeypatch.setattr(TenantErasure, "_erase_object", erase)
    assert await command("delete", "acme", "--yes") == 0
    assert await TenantInventory(connection, subjects, "acme").counts() == {}


async def test_what_is_written_meanwhile_is_deleted_too_or_told(
    connection: Connection, subjects: Subjects, command: Command, capsys: pytest.CaptureFixture[str]
) -> None:
    await store_all(connection, subjects, "acme")
    stop = asyncio.Event()

    async def carry_on() -> None:
        number = 0
        while not stop.is_set():
            number += 1
            await connection.publish(subjects.rsp("acme", f"j{number}"), b"{}")
            await asyncio.sleep(0.05)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(carry_on())
        assert await command("delete", "acme", "--yes") == 1
        assert "run the same command again" in capsys.readouterr().err
        stop.set()
    assert await command("delete", "acme", "--yes") == 0
    assert await TenantInventory(connection, subjects, "acme").counts() == {}


async def test_an_export_has_all_that_is_stored_and_a_manifest_that_can_be_checked(
    connection: Connection, subjects: Subjects, command: Command, tmp_path: Path
) -> None:
    for tenant in ("acme", "rival"):
        await store_all(connection, subjects, tenant)
    before = await all_stored(connection, subjects)
    out = tmp_path / "out" / "acme"
    assert await command("export", "acme", "--out", str(out)) == 0
    assert await all_stored(connection, subjects) == before
    manifest = json.loads((out / "manifest.json").read_text())
    assert manifest["tenant"] == "acme"
    assert manifest["counts"] == await TenantInventory(connection, subjects, "acme").counts()
    written = {str(path.relative_to(out)) for path in out.rglob("*") if path.is_file()}
    assert written == {"manifest.json", *(file["path"] for file in manifest["files"])}
    for file in manifest["files"]:
        data = (out / file["path"]).read_bytes()
        assert (len(data), hashlib.sha256(data).hexdigest()) == (file["bytes"], file["sha256"])
        assert b"rival" not in data
    assert json.loads((out / "responses" / "resp_acme.json").read_text())["answer"] == {"output": f"{SECRET}acme"}
    contents = [path.read_text() for path in (out / "file_contents").iterdir()]
    assert contents == [f"{SECRET}acme" * 30_000]
    job = json.loads((out / "jobs.jsonl").read_text())
    assert job["value"]["messages"][0]["content"] == f"{SECRET}acme"
    assert "hashes" not in json.loads((out / "keys.jsonl").read_text())
    assert not any(path.stat().st_mode & 0o077 for path in (out, *out.rglob("*")))


async def test_an_export_writes_over_nothing_and_replaces_what_one_that_was_stopped_has_left(
    connection: Connection, subjects: Subjects, command: Command, tmp_path: Path
) -> None:
    await store_all(connection, subjects, "acme")
    out = tmp_path / "acme"
    (tmp_path / "acme.partial").mkdir()
    (tmp_path / "acme.partial" / "jobs.jsonl").write_text("half")
    assert await command("export", "acme", "--out", str(out)) == 0
    assert "half" not in (out / "jobs.jsonl").read_text()
    assert not (tmp_path / "acme.partial").exists()
    was = (out / "manifest.json").read_bytes()
    assert await command("export", "acme", "--out", str(out)) == 1
    assert (out / "manifest.json").read_bytes() == was


async def test_frontends_are_told_who_exported_and_who_deleted_a_tenant(
    connection: Connection, subjects: Subjects, command: Command, tmp_path: Path
) -> None:
    acts: list[OperatorAct] = []
    await connection.subscribe(subjects.audit(), lambda message: acts.append(decode(OperatorAct, message.data)))
    await store_all(connection, subjects, "acme")
    assert await command("delete", "acme") == 0  # it changes nothing, so there is nothing to tell
    assert await command("export", "acme", "--out", str(tmp_path / "acme")) == 0
    assert await command("delete", "acme", "--yes") == 0
    await connection.barrier()
    told = [(act.command, act.details["tenant"], act.details.get("state")) for act in acts]
    assert told == [
        ("tenant export", "acme", None),
        ("tenant delete", "acme", "begun"),
        ("tenant delete", "acme", "done"),
    ]
    assert SECRET not in str(acts)


async def test_a_tenant_that_can_have_no_name_is_refused(command: Command, tmp_path: Path) -> None:
    assert await command("delete", "", "--yes") == 1
    assert await command("export", "a\nb", "--out", str(tmp_path / "x")) == 1
