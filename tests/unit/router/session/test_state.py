"""Pull credit follows the room in the window, class by class, and the permission to hold requests."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import cast

import pytest

from headrace.broker.protocol.run import IllegalTransition
from headrace.jetstream.ports import PullLoop
from headrace.jetstream.subjects import REQUEST_CLASSES
from headrace.router.session.state import TRANSITIONS, HeldRequest, RequestCredit, RequestRelease, RequestState, RouterState
from headrace.router.settings import SessionOptions
from tests.support.router.router_parts import router_state
from tests.unit.router.session.test_intake import Scheduler
from tests.unit.router.session.test_window import held


class FakeLoop:
    def __init__(self) -> None:
        self.credit = 0

    def add_credit(self, amount: int) -> None:
        self.credit += amount


def pulling(state: RouterState, *, window: int = 3, window_bytes: int = 1000) -> tuple[RequestCredit, FakeLoop, FakeLoop]:
    credit = RequestCredit(SessionOptions(window=window, window_bytes=window_bytes), state)
    std, moved = FakeLoop(), FakeLoop()
    credit.add("std", cast("PullLoop", std))
    credit.add("re", cast("PullLoop", moved))
    credit.balance()
    return credit, std, moved


async def test_a_full_class_keeps_no_other_out() -> None:
    state = router_state(Scheduler())
    for seq in range(3):
        state.window.add(held(seq, f"r{seq}"))
    _credit, std, moved = pulling(state)
    assert (std.credit, moved.credit) == (0, 3)


async def test_batch_requests_have_a_window_of_their_own_size() -> None:
    credit = RequestCredit(SessionOptions(window=3, batch_window=2), router_state(Scheduler()))
    loops = {name: FakeLoop() for name in REQUEST_CLASSES}
    for name, loop in loops.items():
        credit.add(name, cast("PullLoop", loop))
    credit.balance()
    assert {name: loop.credit for name, loop in loops.items()} == {"re": 3, "hi": 3, "std": 3, "rb": 2, "batch": 2}


async def test_too_many_bytes_stop_every_class() -> None:
    state = router_state(Scheduler())
    state.window.add(held(1))  # 5 bytes
    _credit, std, moved = pulling(state, window_bytes=5)
    assert (std.credit, moved.credit) == (0, 0)


async def test_a_router_that_drains_withdraws_its_credit() -> None:
    state = router_state(Scheduler())
    credit, std, moved = pulling(state)
    assert (std.credit, moved.credit) == (3, 3)
    state.permission.drain()
    credit.balance()
    assert (std.credit, moved.credit) == (0, 0)


async def test_a_router_without_its_lease_asks_for_nothing() -> None:
    _credit, std, moved = pulling(router_state(Scheduler(), lease_held=False))
    assert (std.credit, moved.credit) == (0, 0)


async def test_every_request_that_leaves_the_window_makes_room_for_another() -> None:
    state = router_state(Scheduler())
    settled, dropped, given_back = held(1, "a"), held(2, "b"), held(3, "c")
    for request in (settled, dropped, given_back):
        state.window.add(request)
    credit, std, _moved = pulling(state)
    release = RequestRelease(state, credit)
    release.settle(settled)
    assert std.credit == 1
    release.drop(dropped, "cancelled")
    assert std.credit == 2
    release.give_back(given_back)
    assert std.credit == 3
    assert [request.delivery.said for request in (settled, dropped, given_back)] == [["ack"], ["ack"], ["nak"]]  # type: ignore[attr-defined]


async def test_only_waiting_requests_are_given_back_together() -> None:
    scheduler = Scheduler()
    state = router_state(scheduler)
    waiting, placing = held(1, "a"), held(2, "b")
    for request in (waiting, placing):
        state.window.add(request)
    placing.place()
    credit, _std, _moved = pulling(state)
    RequestRelease(state, credit).give_back_waiting()
    assert (waiting.gone, placing.gone) == (True, False)
    assert scheduler.cancelled == ["a"]


async def test_what_has_left_makes_room_for_as_many_of_its_class_and_no_more_than_the_bytes_allow() -> None:
    state = router_state(Scheduler())
    first, second = held(1, "r1"), held(2, "r2")  # 5 bytes each
    state.window.add(first)
    state.window.add(second)
    credit, std, moved = pulling(state, window_bytes=11)
    moved.credit = 0  # its own requests are on their way
    std.credit = 0
    release = RequestRelease(state, credit)
    release.settle(first)
    assert (std.credit, moved.credit) == (2, 0), "of its class, to the room that is left now"
    state.window.add(held(3, "r3"))
    state.window.add(held(4, "r4"))
    release.settle(second)
    assert std.credit == 2, "one waits more than before"
    state.window.add(held(5, "r5"))
    credit.freed("std")
    assert (std.credit, moved.credit) == (0, 0), "the window has too many bytes"


ROUTER = Path(__file__).parents[4] / "router"
OWNER = ROUTER / "session" / "state.py"

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
