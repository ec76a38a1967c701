"""Claims of an ingress's requests: which are decided at once, and which after a look at the suspects' leases."""

from __future__ import annotations

from headrace.broker.codec import decode
from headrace.broker.ingress.claims import ClaimDecider
from headrace.broker.membership.members import drained_key
from headrace.broker.messages import Claim, ClaimReply, HistoryEntry
from tests.support.ingress_parts import SUBJECTS, Parts


class NoMembers:
    def worker_live(self, pool: str, worker: str) -> bool:
        return False


def claims(parts: Parts) -> ClaimDecider:
    return ClaimDecider(
        parts.messages,  # type: ignore[arg-type]
        SUBJECTS,
        parts.judge,
        parts.outbox,
        NoMembers(),  # type: ignore[arg-type]
        parts.tasks,
    )


def replies(parts: Parts) -> list[ClaimReply]:
    return [decode(ClaimReply, data) for subject, data in parts.messages.sent if subject == "reply"]


def claim(request_id: str = "r", *suspects: str) -> Claim:
    history = [HistoryEntry(number, worker) for number, worker in enumerate(suspects, start=1)]
    return Claim(id=request_id, attempt=len(suspects) + 1, run=7, worker="w9", history=history)


async def test_a_claim_without_suspects_is_decided_at_once() -> None:
    parts = Parts()
    claims(parts).on_claim(claim(), "reply")
    claims(parts).on_claim(claim("unheard-of"), "reply")
    assert [reply.verdict for reply in replies(parts)] == ["go", "unknown"]


async def test_only_suspects_without_lease_and_without_a_drain_count_as_crashed() -> None:
    parts = Parts()
    for number, worker in enumerate(("w1", "w2", "w3"), start=1):
        parts.record.hold(number, worker)
    parts.messages.stored = {SUBJECTS.worker_key("p", "w1"): b"lease", drained_key("w2"): b"1"}
    async with parts.tasks:
        claims(parts).on_claim(claim("r", "w1", "w2", "w3"), "reply")
        assert replies(parts) == []
    (reply,) = replies(parts)
    assert (reply.verdict, reply.crashes) == ("go", 1)


async def test_a_claim_with_suspects_gets_no_answer_from_an_ingress_that_does_not_run() -> None:
    parts = Parts()
    claims(parts).on_claim(claim("r", "w1"), "reply")
    assert replies(parts) == []
