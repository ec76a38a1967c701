"""What a router session says about where prompts are computed: in the placed message, to the other routers, in its metrics."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any

import msgspec
import pytest
from prometheus_client import REGISTRY

from headrace.broker.codec import decode, parse_prefill_header
from headrace.broker.messages.events import JobEvent, JobEvents
from headrace.broker.messages.frames import JobFault
from headrace.broker.messages.requests import HEADER_KEPT, HEADER_PREFILL, HEADER_RANK, PrefillDecision
from headrace.jetstream.tasks import TaskScope
from headrace.router.placement.types import Placement, Waiting
from headrace.router.session.metrics import PredictionAccuracy
from headrace.router.session.placing import Placer, Refuser
from headrace.router.session.window import HeldRequest, RequestHead
from tests.support.router.router_parts import FakeDelivery, request_window, router_deps

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


class Undone:
    """A scheduler that is told of placements that did not happen."""

    def __init__(self) -> None:
        self.unplaced: list[str] = []

    def unplace(self, placement: Placement, now_s: float) -> None:
        self.unplaced.append(placement.request.id)


def placement(prefill: PrefillDecision | None, *, kept: bool = False, place: str = "w") -> Placement:
    return Placement(
        request=Waiting(id="r", tokens=500, chain=[1, 2]),
        worker=place,
        uncached=500,
        new_blocks=[1, 2],
        predicted_ttft_s=0.5,
        waited_s=0.1,
        reason="load",
        prefill=prefill,
        kept=kept,
    )


def held() -> HeldRequest:
    head = RequestHead(id="r", judge="i", deadline=1e12, tokens=500)
    return HeldRequest(FakeDelivery(7), head, 2, [], "std")  # type: ignore[arg-type]


class Parts:
    """The way of a request from the placer on."""

    def __init__(self, messaging: FakeMessaging, scheduler: object = None) -> None:
        deps = router_deps(messaging)
        self.tasks = TaskScope()
        self.window = request_window(scheduler)
        self.refuser = Refuser(deps, self.tasks, self.window)
        self.recorded: list[str] = []

        def record(held: HeldRequest, placement: Placement) -> None:
            self.recorded.append(placement.worker)

        self.placer = Placer(deps, self.tasks, self.window, self.refuser, PredictionAccuracy(), record)


async def place(prefill: PrefillDecision | None, *, kept: bool = False, where: str = "w") -> FakeMessaging:
    messaging = FakeMessaging()
    parts = Parts(messaging)
    one = held()
    parts.window.add(one)
    async with asyncio.timeout(5), parts.tasks:
        parts.placer.place(one, placement(prefill, kept=kept, place=where))
    await asyncio.sleep(0)
    return messaging


@pytest.mark.parametrize("decision", [REMOTE, NAMED, LOCAL])
async def test_the_decision_travels_with_the_placed_message_beside_its_attempt(decision: PrefillDecision) -> None:
    headers = (await place(decision)).published[0]["headers"]
    assert parse_prefill_header(headers) == decision
    assert headers["Hr-Attempt"] == "2"


async def test_a_request_for_a_rank_goes_to_its_worker_with_the_rank_beside_it() -> None:
    made = await place(None, where="w~1")
    assert (made.published[0]["subject"], made.published[0]["headers"][HEADER_RANK]) == ("hr.work.p.w", "1")
    (event,) = decode(JobEvents, made.sent[0]).events
    assert (event.worker, event.rank) == ("w", 1)
    assert HEADER_RANK not in (await place(None)).published[0]["headers"]


async def test_a_rank_that_computes_the_prompt_is_named_beside_its_worker() -> None:
    headers = (await place(msgspec.structs.replace(NAMED, worker="p1~3"))).published[0]["headers"]
    decision = parse_prefill_header(headers)
    assert decision is not None
    assert (decision.worker, decision.rank) == ("p1", 3)


async def test_where_there_is_nothing_to_decide_nothing_is_said() -> None:
    assert HEADER_PREFILL not in (await place(None)).published[0]["headers"]


@pytest.mark.parametrize("kept", [False, True])
async def test_the_worker_is_told_of_a_batch_request_that_it_must_not_preempt(*, kept: bool) -> None:
    assert (HEADER_KEPT in (await place(None, kept=kept)).published[0]["headers"]) is kept


@pytest.mark.parametrize(("decision", "told"), [(REMOTE, "*"), (NAMED, "p1"), (LOCAL, ""), (None, "")])
async def test_other_routers_are_told_who_computes_the_prompt(decision: PrefillDecision | None, told: str) -> None:
    (event,) = decode(JobEvents, (await place(decision)).sent[0]).events
    assert (event.kind, event.prefill) == ("placed", told)


@pytest.mark.parametrize(("decision", "where"), [(REMOTE, "remote"), (LOCAL, "local")])
async def test_every_decision_is_counted_with_its_reason(decision: PrefillDecision, where: str) -> None:
    def value() -> float:
        labels = {"where": where, "reason": decision.reason}
        return REGISTRY.get_sample_value("headrace_router_prefill_total", labels) or 0.0

    parts = Parts(FakeMessaging())
    before = value()
    for one in (decision, None):
        request = held()
        parts.window.add(request)
        request.place()
        parts.placer.placed(request, placement(one), duplicate=False)
        assert request.gone
        assert request.delivery.said == ["ack"]  # type: ignore[attr-defined]
    assert value() == before + 1
    assert parts.recorded == ["w", "w"]


async def test_a_duplicate_was_announced_by_the_router_that_stored_it() -> None:
    messaging = FakeMessaging()
    parts = Parts(messaging)
    request = held()
    parts.window.add(request)
    request.place()
    parts.placer.placed(request, placement(LOCAL), duplicate=True)
    await asyncio.sleep(0)
    assert messaging.sent == []
    assert request.gone


async def test_a_worker_whose_queue_is_full_sends_the_request_back_to_wait() -> None:
    scheduler = Undone()
    parts = Parts(FakeMessaging(), scheduler)
    request = held()
    parts.window.add(request)
    request.place()
    parts.placer.full(request, placement(LOCAL))
    assert request.waiting
    assert scheduler.unplaced == ["r"]
    assert parts.window.changed.is_set()


async def test_a_request_that_was_displaced_while_it_was_placed_does_not_come_back() -> None:
    scheduler = Undone()
    parts = Parts(FakeMessaging(), scheduler)
    request = held()
    parts.window.add(request)
    request.place()
    parts.window.remove(request)  # its stream was deleted and made again
    parts.placer.full(request, placement(LOCAL))
    parts.placer.impossible(request, JobFault("engine_error", "too large"))
    assert request.gone
    assert scheduler.unplaced == []
    assert parts.refuser.in_flight == 0


def test_a_prompt_computed_elsewhere_is_judged_by_what_the_decode_worker_had_cached() -> None:
    def lost() -> float:
        return REGISTRY.get_sample_value("headrace_router_overlap_lost_tokens_total") or 0.0

    before = lost()
    seen = PredictionAccuracy()
    seen.placed(placement(REMOTE))
    seen.on_event(JobEvent("prefilled", "r", 1, "w", 500, 500), 11.0)
    assert lost() == before
