"""Requests of a frontend that records them are listed by an operator, kept as he says, and gone with their tenant."""

from __future__ import annotations

import asyncio
import json
import sys

import pytest

from headrace.broker.tenants import TenantErasure, TenantInventory
from headrace.cli import main
from headrace.frontend.metrics import Metrics
from headrace.frontend.request_audit import Ended, audit_writer
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.client import Connection
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.provision import ensure_topology, plan, status
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology


def ended(tenant: str, number: int) -> Ended:
    return Ended(at=1e9 + number, id=f"{tenant}-{number}", route="/v1/completions", tenant=tenant, status=200, took_s=0.1)


async def record(connection: Connection, subjects: Subjects, *tenants: str) -> None:
    settings = FrontendSettings(audit="metadata")
    writer = await audit_writer(connection, Topology(subjects), settings, Metrics(), frontend="i")
    assert writer is not None
    for number, tenant in enumerate(tenants):
        writer.note(ended(tenant, number))
    running = asyncio.ensure_future(writer.run())
    while (await connection.stream_state(subjects.stream("AUDIT"))).messages < len(tenants):
        await asyncio.sleep(0.01)
    running.cancel()
    await asyncio.wait([running])


async def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    capsys.readouterr()
    code = await asyncio.to_thread(main, ["audit", *words])
    return code, *capsys.readouterr()


async def test_records_are_listed_kept_and_deleted_with_their_tenant(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer, capsys: pytest.CaptureFixture[str]
) -> None:
    where = ("--nats", nats_server.url, "--prefix", subjects.prefix)
    code, _, said = await run(capsys, "ls", *where)
    assert code != 0
    assert "nothing is recorded" in said
    assert subjects.stream("AUDIT") not in {one.stream for one in await status(connection, Topology(subjects))}

    await record(connection, subjects, "acme", "zoo", "acme")
    _, listed, _ = await run(capsys, "ls", "--json", *where)
    assert [json.loads(line)["id"] for line in listed.splitlines()] == ["acme-0", "zoo-1", "acme-2"]
    _, listed, _ = await run(capsys, "ls", "--tenant", "acme", "--limit", "1", *where)
    assert listed.count("\n") == 1
    assert "tenant acme" in listed
    assert (await run(capsys, "ls", "--since", "1", *where))[1] == ""

    code, said, _ = await run(capsys, "keep", "--days", "7", "--mib", "8", *where)
    assert (code, said) == (0, "records are kept for 7 days, and at most 8 MiB of them\n")
    await ensure_topology(connection, Topology(subjects))  # as every part does at its start
    (kept,) = [one for one in await plan(connection, Topology(subjects)) if one.stream == subjects.stream("AUDIT")]
    assert kept.action == "keep"
    assert (await connection.stream_state(subjects.stream("AUDIT"))).max_bytes == 8 * 1024 * 1024

    inventory = TenantInventory(connection, subjects, "acme")
    assert (await inventory.counts())["audit_records"] == 2
    deleted, clean = await TenantErasure(inventory).run()
    assert (deleted, clean) == ({"audit_records": 2}, True)
    _, listed, _ = await run(capsys, "ls", "--json", *where)
    assert [json.loads(line)["id"] for line in listed.splitlines()] == ["zoo-1"]


async def test_records_are_printed_as_they_are_written(
    connection: Connection, subjects: Subjects, nats_server: EmbeddedServer
) -> None:
    await record(connection, subjects, "acme")
    following = await asyncio.create_subprocess_exec(
        *(
            sys.executable,
            "-P",
            "-m",
            "headrace",
            "audit",
            "follow",
            "--json",
            "--nats",
            nats_server.url,
            "--prefix",
            subjects.prefix,
        ),
        stdout=asyncio.subprocess.PIPE,
    )
    assert following.stdout is not None
    try:
        line = asyncio.ensure_future(following.stdout.readline())
        number = 1
        while not line.done():  # it prints what is written once it follows
            number += 1
            await record(connection, subjects, *["acme"] * number)
            await asyncio.wait([line], timeout=0.2)
        assert json.loads(line.result())["tenant"] == "acme"
    finally:
        following.kill()
        await following.wait()


async def test_the_stream_is_not_made_where_nothing_is_recorded(connection: Connection, subjects: Subjects) -> None:
    assert await audit_writer(connection, Topology(subjects), FrontendSettings(), Metrics(), frontend="i") is None
    assert subjects.stream("AUDIT") not in {one.stream for one in await status(connection, Topology(subjects))}
