"""What a router session says about where prompts are computed: in the placed message, to the other routers, in its metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import REGISTRY

from headrace.broker.codec import decode, parse_prefill_header
from headrace.broker.messages import HEADER_PREFILL, JobEvent, JobEvents, PrefillDecision
from headrace.broker.settings import Timing
from headrace.jetstream.subjects import Subjects
from headrace.router.placement.types import Placement, Waiting
from headrace.router.session.dispatcher import Dispatcher
from headrace.router.session.placement_events import Announcer
from headrace.router.session.placer import Placer
from headrace.router.session.prediction_accuracy import PredictionAccuracy
from headrace.router.session.window import HeldRequest, RequestHead

REMOTE = PrefillDecision(remote=True, reason="pays", wait_s=0.5)
NAMED = PrefillDecision(remote=True, worker="p1", reason="prefix_there", wait_s=0.5)
LOCAL = PrefillDecision(remote=False, reason="short")


@dataclass
class Ack:
    duplicate: bool = False


@dataclass
class FakeMessaging:
    published: list[dict[str, Any]] = field(default_factory=list)
    sent: list[bytes] = field(default_factory=list)

    async def publish(self, subject: str, data: bytes, **options: Any) -> Ack:
        self.published.append({"subject": subject, **options})
        return Ack()

    def send(self, subject: str, data: bytes) -> None:
        self.sent.append(data)


@dataclass
class FakeDelivery:
    stream_seq: int = 7
    data: bytes = b"x"


def placement(prefill: PrefillDecision | None) -> Placement:
    return Placement(
        request=Waiting(id="r", tokens=500, chain=[1, 2]),
        worker="w",
        uncached=500,
        new_blocks=[1, 2],
        predicted_ttft_s=0.5,
        waited_s=0.1,
        reason="load",
        prefill=prefill,
    )


def held() -> HeldRequest:
    head = RequestHead(id="r", judge="i", deadline=1e12, tokens=500)
    return HeldRequest(FakeDelivery(), head, 2, [], "std")  # type: ignore[arg-type]


async def place(prefill: PrefillDecision | None) -> FakeMessaging:
    messaging = FakeMessaging()
    subjects = Subjects()
    placer = Placer(
        messaging,  # type: ignore[arg-type]
        subjects,
        Announcer(messaging, subjects, pool="p", router="r1"),  # type: ignore[arg-type]
        pool="p",
        timing=Timing(),
        on_placed=lambda held, placement: None,
        on_full=lambda held, placement: None,
        on_impossible=lambda held, fault: None,
    )
    async with asyncio.timeout(5), asyncio.TaskGroup() as tasks:
        placer.tasks = tasks
        placer.place(held(), placement(prefill))
    await asyncio.sleep(0)
    return messaging


@pytest.mark.parametrize("decision", [REMOTE, NAMED, LOCAL])
async def test_the_decision_travels_with_the_placed_message_beside_its_attempt(decision: PrefillDecision) -> None:
    headers = (await place(decision)).published[0]["headers"]
    assert parse_prefill_header(headers) == decision
    assert headers["Hr-Attempt"] == "2"


async def test_where_there_is_nothing_to_decide_nothing_is_said() -> None:
    assert HEADER_PREFILL not in (await place(None)).published[0]["headers"]


@pytest.mark.parametrize(("decision", "told"), [(REMOTE, "*"), (NAMED, "p1"), (LOCAL, ""), (None, "")])
async def test_other_routers_are_told_who_computes_the_prompt(decision: PrefillDecision | None, told: str) -> None:
    (event,) = decode(JobEvents, (await place(decision)).sent[0]).events
    assert (event.kind, event.prefill) == ("placed", told)


@pytest.mark.parametrize(("decision", "where"), [(REMOTE, "remote"), (LOCAL, "local")])
async def test_every_decision_is_counted_with_its_reason(decision: PrefillDecision, where: str) -> None:
    def value() -> float:
        labels = {"where": where, "reason": decision.reason}
        return REGISTRY.get_sample_value("headrace_router_prefill_total", labels) or 0.0

    done: list[str] = []
    desk = SimpleNamespace(
        _hindsight=PredictionAccuracy(), _record=None, settle=lambda held, how: done.append(held.id), _changed=lambda: None
    )
    before = value()
    for one in (decision, None):
        Dispatcher._on_placed(desk, held(), placement(one))  # type: ignore[arg-type]
    assert value() == before + 1
    assert done == ["r", "r"]


def test_a_prompt_computed_elsewhere_is_judged_by_what_the_decode_worker_had_cached() -> None:
    def lost() -> float:
        return REGISTRY.get_sample_value("headrace_router_overlap_lost_tokens_total") or 0.0

    before = lost()
    seen = PredictionAccuracy()
    seen.placed(placement(REMOTE))
    seen.on_event(JobEvent("prefilled", "r", 1, "w", 500, 500), 11.0)
    assert lost() == before
