"""What a decode worker does not want any more: whoever has taken it is told, and what nobody has taken is deleted.

The searches show next to nothing of it, because both are made good in other ways: a prefill worker asks again about what it
keeps, and whoever takes a job is told that it is stale.  Without it time, blocks and a prompt computed for nobody are lost.
"""

from __future__ import annotations

import asyncio
from typing import Any, cast

from headrace.broker.codec import decode
from headrace.broker.membership.members import Members
from headrace.broker.messages.prefill import PrefillDrop, PrefillJob, PrefillTaken
from headrace.broker.prefill_client import PrefillClient
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.ports import Messaging, PubAck
from headrace.jetstream.subjects import Subjects

SUBJECTS = Subjects("hr")


class Wire:
    """A server that stores everything, and what was sent and deleted."""

    def __init__(self) -> None:
        self.sent: list[tuple[str, list[str]]] = []
        self.deleted: list[tuple[str, int]] = []

    async def publish(self, subject: str, data: bytes, **options: Any) -> PubAck:
        return PubAck("HR_PREFILL", 41, False)

    def send(self, subject: str, data: bytes) -> None:
        self.sent.append((subject, decode(PrefillDrop, data).jobs))

    async def delete_message(self, stream: str, seq: int) -> bool:
        self.deleted.append((stream, seq))
        return True


def client(wire: Wire) -> PrefillClient:
    members = cast("Members", None)  # nobody is looked for here
    deps = WorkerDeps(messaging=cast("Messaging", wire), subjects=SUBJECTS, wall=lambda: 0.0)
    return PrefillClient(deps, members, pool="p", worker="d-1")


JOB = PrefillJob(job="j", id="r", attempt=1, decode="d-1", deadline=60.0, created=0.0, tokens=1, uncached=1)


async def test_whoever_has_taken_it_is_told_once_to_drop_it() -> None:
    wire = Wire()
    asking = client(wire)
    await asking.publish(JOB)
    asking.on_taken(PrefillTaken(job="j", worker="p-1"))
    assert asking.settle("j") == "p-1"
    assert asking.settle("j") == ""
    assert wire.sent == [(SUBJECTS.control("p-1"), ["j"])]
    assert len(asking) == 0


async def test_what_nobody_has_taken_is_deleted() -> None:
    wire = Wire()
    asking = client(wire)
    await asking.publish(JOB)
    assert asking.settle("j") == ""
    running = asyncio.create_task(asking.run())
    async with asyncio.timeout(1):
        while not wire.deleted:
            await asyncio.sleep(0)
    running.cancel()
    assert (wire.sent, wire.deleted) == ([], [(SUBJECTS.stream("PREFILL"), 41)])
