"""What a router holds un-acked, and when it no longer does."""

from __future__ import annotations

import ast
import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages.requests import Envelope
from headrace.broker.protocol.run import IllegalTransition
from headrace.jetstream.ports import PullLoop
from headrace.jetstream.subjects import REQUEST_CLASSES
from headrace.router.session.window import TRANSITIONS, HeldRequest, RequestHead, RequestState, RequestWindow
from tests.support.router.router_parts import FakeDelivery, held, request_window


def test_a_head_is_an_envelope_without_its_payload() -> None:
    body = encode(
        Envelope(
            id="a", pool="p", model="m", judge="j", deadline=2.0, created=1.0, tokens=7, payload=b"x" * 99, session="s",
            affinity="hard", worker="w", require=["l"], prefer={"p": 2.0}, adapter="d", hashes=b"12345678", block_size=4,
        )
    )  # fmt: skip
    head = decode(RequestHead, body)
    assert (head.id, head.judge, head.deadline, head.created, head.tokens) == ("a", "j", 2.0, 1.0, 7)
    assert (head.session, head.affinity, head.worker, head.require, head.prefer) == ("s", "hard", "w", ["l"], {"p": 2.0})
    assert (head.adapter, head.hashes, head.block_size) == ("d", b"12345678", 4)
    with pytest.raises(WireError):
        decode(RequestHead, b"\x80")


def test_every_routing_field_of_an_envelope_is_in_the_head() -> None:
    left_out = {"pool", "model", "payload", "spill", "kind"}
    assert set(Envelope.__struct_fields__) - left_out == set(RequestHead.__struct_fields__)


async def test_it_counts_requests_and_bytes_by_class() -> None:
    window = request_window()
    one, two = held(1, "a"), held(1, "b", "re")
    window.add(one)
    window.add(two)
    assert (len(window), window.bytes, window.counts.get("std", 0), window.counts.get("re", 0), window.counts.get("hi", 0)) == (
        2,
        10,
        1,
        1,
        0,
    )
    assert window.of("b") is two
    assert window.remove(one)
    assert not window.remove(one)
    assert (len(window), window.bytes, window.counts.get("std", 0), one.state) == (1, 5, 0, RequestState.GONE)


async def test_a_request_is_found_by_the_stream_and_the_sequence_of_its_message() -> None:
    window = request_window()
    one, moved = held(7), held(9, "moved", "rb")
    window.add(one)
    window.add(moved)
    assert window.at(FakeDelivery(7), "std") is one
    assert window.at(FakeDelivery(7), "re") is None  # moved requests lie in another stream
    assert window.at(FakeDelivery(8), "std") is None
    assert window.at(FakeDelivery(9), "re") is moved
    assert window.at(FakeDelivery(9), "batch") is None


async def test_two_requests_of_one_id_are_never_held_together() -> None:
    window = request_window()
    window.add(held(1))
    with pytest.raises(KeyError):
        window.add(held(2))


async def test_what_was_not_extended_in_time_is_ours_no_more() -> None:
    window = request_window(ack_wait_s=0.05)
    one = held(1)
    window.add(one)
    window.extend()
    assert window.claims_valid
    assert one.delivery.said == ["progress"]  # type: ignore[attr-defined]
    await asyncio.sleep(0.06)
    assert not window.claims_valid
    window.restart_claims()
    assert window.claims_valid


async def test_the_age_of_a_window_is_that_of_its_oldest_request() -> None:
    window = request_window(ack_wait_s=30.0)
    assert window.oldest_s(100.0) == 0.0
    created = {"a": 97.0, "b": 90.0, "c": 99.0}
    for seq, (request_id, at) in enumerate(created.items(), 1):
        head = RequestHead(id=request_id, judge="j", deadline=1.0, created=at, tokens=3)
        window.add(HeldRequest(FakeDelivery(seq), head, 1, [], "std"))  # type: ignore[arg-type]
    assert window.oldest_s(100.0) == 10.0
    assert window.oldest_s(80.0) == 0.0  # clocks of machines differ
    oldest = window.of("b")
    assert oldest is not None
    window.remove(oldest)
    assert window.oldest_s(100.0) == 3.0


# Pull credit follows the room in the window, class by class, and the permission to hold requests.


class Scheduler:
    def __init__(self) -> None:
        self.cancelled: list[str] = []

    def cancel(self, ids: list[str]) -> None:
        self.cancelled += ids


class FakeLoop:
    def __init__(self) -> None:
        self.credit = 0

    def add_credit(self, amount: int) -> None:
        self.credit += amount


def pulling(window: RequestWindow) -> tuple[FakeLoop, FakeLoop]:
    std, moved = FakeLoop(), FakeLoop()
    window.pull("std", cast("PullLoop", std))
    window.pull("re", cast("PullLoop", moved))
    window.balance()
    return std, moved


def small_window(scheduler: Scheduler | None = None, **options: Any) -> RequestWindow:
    return request_window(scheduler or Scheduler(), **{"window": 3, "window_bytes": 1000, **options})


async def test_a_full_class_keeps_no_other_out() -> None:
    window = small_window()
    for seq in range(3):
        window.add(held(seq, f"r{seq}"))
    std, moved = pulling(window)
    assert (std.credit, moved.credit) == (0, 3)


async def test_batch_requests_have_a_window_of_their_own_size() -> None:
    window = request_window(Scheduler(), window=3, batch_window=2)
    loops = {name: FakeLoop() for name in REQUEST_CLASSES}
    for name, loop in loops.items():
        window.pull(name, cast("PullLoop", loop))
    window.balance()
    assert {name: loop.credit for name, loop in loops.items()} == {"re": 3, "hi": 3, "std": 3, "rb": 2, "batch": 2}


async def test_too_many_bytes_stop_every_class() -> None:
    window = small_window(window_bytes=5)
    window.add(held(1))  # 5 bytes
    std, moved = pulling(window)
    assert (std.credit, moved.credit) == (0, 0)


async def test_a_router_that_drains_withdraws_its_credit() -> None:
    window = small_window()
    std, moved = pulling(window)
    assert (std.credit, moved.credit) == (3, 3)
    window.draining = True
    window.balance()
    assert (std.credit, moved.credit) == (0, 0)


async def test_a_router_without_its_lease_asks_for_nothing() -> None:
    std, moved = pulling(small_window(lease_held=False))
    assert (std.credit, moved.credit) == (0, 0)


async def test_every_request_that_leaves_the_window_makes_room_for_another() -> None:
    window = small_window()
    settled, dropped, given_back = held(1, "a"), held(2, "b"), held(3, "c")
    for request in (settled, dropped, given_back):
        window.add(request)
    std, _moved = pulling(window)
    window.settle(settled)
    assert std.credit == 1
    window.drop(dropped, "cancelled")
    assert std.credit == 2
    window.give_back(given_back)
    assert std.credit == 3
    assert [request.delivery.said for request in (settled, dropped, given_back)] == [["ack"], ["ack"], ["nak"]]  # type: ignore[attr-defined]


async def test_only_waiting_requests_are_given_back_together() -> None:
    scheduler = Scheduler()
    window = small_window(scheduler)
    waiting, placing = held(1, "a"), held(2, "b")
    for request in (waiting, placing):
        window.add(request)
    placing.place()
    window.give_back_waiting()
    assert (waiting.gone, placing.gone) == (True, False)
    assert scheduler.cancelled == ["a"]


async def test_what_has_left_makes_room_for_as_many_of_its_class_and_no_more_than_the_bytes_allow() -> None:
    window = small_window(window_bytes=11)
    requests = [held(seq, f"r{seq}") for seq in range(1, 7)]  # 5 bytes each
    first, second = requests[:2]
    window.add(first)
    window.add(second)
    std, moved = pulling(window)
    moved.credit = 0  # its own requests are on their way
    std.credit = 0
    window.settle(first)
    assert (std.credit, moved.credit) == (2, 0), "of its class, to the room that is left now"
    window.add(requests[2])
    window.add(requests[3])
    window.settle(second)
    assert std.credit == 2, "one waits more than before"
    window.add(requests[4])
    window.add(requests[5])
    window.settle(requests[2])
    assert (std.credit, moved.credit) == (0, 0), "the window has too many bytes"


ROUTER = Path(__file__).parents[4] / "router"
OWNER = ROUTER / "session" / "window.py"

METHODS: dict[str, tuple[Callable[[HeldRequest], None], RequestState]] = {
    "place": (HeldRequest.place, RequestState.PLACING),
    "wait_again": (HeldRequest.wait_again, RequestState.WAITING),
    "refuse": (HeldRequest.refuse, RequestState.REFUSING),
    "leave": (HeldRequest.leave, RequestState.GONE),
}


@pytest.mark.parametrize("name", METHODS)
@pytest.mark.parametrize("before", RequestState)
def test_each_method_reaches_its_state_or_raises(before: RequestState, name: str) -> None:
    method, after = METHODS[name]
    request = held()
    request.state = before
    if after in TRANSITIONS[before]:
        method(request)
        assert request.state is after
    else:
        with pytest.raises(IllegalTransition, match=f"{before.name} cannot become {after.name}"):
            method(request)
        assert request.state is before


def test_every_state_has_a_row_and_every_request_can_leave() -> None:
    assert set(TRANSITIONS) == set(RequestState)
    for state in RequestState:
        assert state is RequestState.GONE or RequestState.GONE in TRANSITIONS[state]
    assert held().waiting


def assignments(source: str) -> list[int]:
    """The lines that assign to an attribute called `state`, by a statement or by setattr."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            found += [node.lineno for arg in node.args if isinstance(arg, ast.Constant) and arg.value == "state"]
    return found


def test_no_other_module_of_the_router_assigns_the_state() -> None:
    modules = sorted(ROUTER.rglob("*.py"))
    assert OWNER in modules
    assert assignments(OWNER.read_text()), "the check sees assignments"
    assert [f"{path}:{line}" for path in modules if path != OWNER for line in assignments(path.read_text())] == []


@pytest.mark.parametrize(
    "source",
    ['held.state = "waiting"', 'a, held.state = 1, "gone"', "del held.state", 'setattr(held, "state", "gone")', "x.state += 1"],
)
def test_the_check_sees_every_way_to_assign(source: str) -> None:
    assert assignments(source) == [1]
