"""A request in the window changes its state by its methods only, and only as its table allows."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.broker.protocol.transitions import IllegalTransition
from headrace.router.session.held_request import TRANSITIONS, HeldRequest, RequestState
from tests.unit.router.session.test_window import held

ROUTER = Path(__file__).parents[4] / "router"
OWNER = ROUTER / "session" / "held_request.py"

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
