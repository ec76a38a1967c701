"""Large payloads and results at a real nats-server with logins: workers of another pool read nothing of their content."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from headrace.broker.errors import BrokerError
from headrace.broker.ingress.spill_store import SpillStore
from headrace.broker.messages.requests import Envelope
from headrace.broker.spill import ResultObjects, fetch_payload
from headrace.jetstream.logins.roles import PARTS_API, Login
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.support.guarded_server import Guarded, guarded_server

S = Subjects("hr")
PROMPT = b"my secret PIN is 4711, " * 30_000
WORKER, OTHER = Login("worker", "a", "w1"), Login("worker", "b", "w9")


@pytest_asyncio.fixture
async def guarded(tmp_path: Path) -> AsyncIterator[Guarded]:
    async with guarded_server(tmp_path, [Login("operator"), Login("ingress"), WORKER, OTHER]) as server:
        yield server


def envelope(spill: Any) -> Envelope:
    return Envelope(id="r", pool="a", model="m", judge="i", deadline=2e9, created=1e9, tokens=4, spill=spill)


async def test_a_large_prompt_is_read_by_who_has_its_request_only(guarded: Guarded) -> None:
    async with await guarded.as_(Login("ingress")) as ingress, await guarded.as_(WORKER) as worker, TaskScope() as tasks:
        members: Any = None
        store = SpillStore(ingress, S, members, tasks, ingress="i", sealed=True)
        spill = await store.put("r", PROMPT, largest=1 << 20, ttl_s=60.0)
        assert await fetch_payload(worker, S, envelope(spill), wanted=lambda: True) == PROMPT
        async with await guarded.as_(OTHER) as other:
            theirs = other.objects(S.bucket("spill"))
            stored = await theirs.get(spill.object)
            assert b"secret PIN" not in stored
            await theirs.put(spill.object, stored[:-1] + bytes([stored[-1] ^ 1]), ttl_s=60.0)
        with pytest.raises(BrokerError, match="damaged"):
            await fetch_payload(worker, S, envelope(spill), wanted=lambda: True)


async def test_a_large_result_of_a_worker_is_read_by_its_ingress_only(guarded: Guarded) -> None:
    async with await guarded.as_(Login("ingress")) as ingress, await guarded.as_(WORKER) as worker:
        spill = await ResultObjects(worker, S, sealed=True).put("r-0", PROMPT)
        assert await ResultObjects(ingress, S).get(spill) == PROMPT
        async with await guarded.as_(OTHER) as other:
            assert b"secret PIN" not in await other.objects(S.bucket("spill")).get(spill.object)


async def test_a_worker_neither_reads_nor_writes_the_large_results_of_jobs(guarded: Guarded) -> None:
    async with await guarded.as_(WORKER) as worker:
        refused: set[str] = set()
        worker.core.on_permission_error = refused.add
        stream = f"OBJ_{S.bucket('results')}"
        attempts = [f"{PARTS_API}.{call}.{stream}" for call in ("DIRECT.GET", "STREAM.MSG.GET", "STREAM.PURGE")]
        attempts += [f"$O.{S.bucket('results')}.C.x", f"{PARTS_API}.STREAM.PURGE.OBJ_{S.bucket('spill')}"]
        for subject in attempts:
            worker.send(subject, b"{}")
        await worker.barrier()
    assert len(refused) == len(attempts)
