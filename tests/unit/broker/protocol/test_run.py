"""A run changes its state by its methods only, and only as its table allows."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.broker.protocol.run import TRANSITIONS, IllegalTransition, Run, RunState
from tests.unit.broker.protocol.test_protocol_runs import make

ROOT = Path(__file__).parents[4]
PRODUCT = ("jetstream", "broker", "workers", "router", "frontend", "headrace", "tools")
OWNERS = {
    "broker/protocol/run.py": "Run",
    "broker/prefill_server.py": "HeldPrefill",
}
OTHERS = {
    "workers/nixl/mover.py",  # a transfer
    "router/session",  # a request in the window
}

MOVES: dict[str, tuple[Callable[[Run], None], RunState]] = {
    "claim": (Run.claim, RunState.CLAIMING),
    "wait_again": (Run.wait_again, RunState.WAITING),
    "start": (Run.start, RunState.RUNNING),
    "lapse": (Run.lapse, RunState.LAPSED),
    "confirm": (Run.confirm, RunState.RUNNING),
    "end": (lambda run: run.end(3.0), RunState.ENDED),
    "move": (Run.move, RunState.MOVING),
    "forget": (Run.forget, RunState.GONE),
}


def in_state(state: RunState) -> Run:
    run = make()
    run.begin([], [])
    run.state = state
    return run


@pytest.mark.parametrize("name", MOVES)
@pytest.mark.parametrize("before", RunState)
def test_each_method_reaches_its_state_or_raises(before: RunState, name: str) -> None:
    method, after = MOVES[name]
    run = in_state(before)
    if after in TRANSITIONS[before]:
        method(run)
        assert run.state is after
    else:
        with pytest.raises(IllegalTransition, match=f"{before.name} cannot become {after.name}"):
            method(run)
        assert run.state is before


def test_every_state_has_a_row_and_every_run_can_be_forgotten() -> None:
    assert set(TRANSITIONS) == set(RunState)
    for state in RunState:
        assert state is RunState.GONE or RunState.GONE in TRANSITIONS[state]


def test_a_run_that_ended_knows_when_its_last_frame_was_sent() -> None:
    run = in_state(RunState.RUNNING)
    run.end(3.0)
    assert run.resent_s == 3.0


def assignments(source: str) -> list[int]:
    """The lines that assign to an attribute called `state`, by a statement or by setattr.

    A constructor that gives its own object a `state` is not meant.
    """
    found = []
    tree = ast.parse(source)
    constructors = [n for n in ast.walk(tree) if isinstance(n, ast.FunctionDef) and n.name == "__init__"]
    own = {
        n for init in constructors for n in ast.walk(init) if isinstance(n, ast.Attribute) and ast.unparse(n) == "self.state"
    }
    for node in ast.walk(tree):
        if node in own:
            continue
        if isinstance(node, ast.Attribute) and node.attr == "state" and isinstance(node.ctx, ast.Store | ast.Del):
            found.append(node.lineno)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "object.__setattr__"):
            found += [node.lineno for arg in node.args if isinstance(arg, ast.Constant) and arg.value == "state"]
    return found


def test_nothing_outside_its_file_assigns_the_state_of_a_run() -> None:
    outside = {}
    for folder in PRODUCT:
        for path in (ROOT / folder).rglob("*.py"):
            name = str(path.relative_to(ROOT))
            if name in OWNERS or any(name.startswith(other) for other in OTHERS):
                continue
            text = path.read_text()
            if "state" in text and (lines := assignments(text)):
                outside[name] = lines
    assert outside == {}


@pytest.mark.parametrize(
    "line",
    [
        "run.state = RunState.ENDED",
        "self.run.state = other",
        "a, run.state = 1, 2",
        "run.state: RunState = other",
        "setattr(run, 'state', other)",
        "for run.state in states: pass",
        "def __init__(self, run): run.state = other",
        "def start(self): self.state = other",
    ],
)
def test_an_assignment_would_be_found(line: str) -> None:
    assert assignments(line) == [1]
    assert assignments("if run.state is RunState.ENDED: state = run.state") == []


@pytest.mark.parametrize("owner", OWNERS)
def test_the_owners_are_where_the_rule_says(owner: str) -> None:
    assert assignments((ROOT / owner).read_text())
