"""Engines by name."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.workers.engine_registry import MEMBERS, create
from headrace.workers.errors import EngineStartFailed
from headrace.workers.sim.engine import SimEngine


def test_the_simulator_is_found_by_name() -> None:
    assert isinstance(create("sim"), SimEngine)


async def test_an_engine_of_the_users_own_is_found_by_module_and_class() -> None:
    assert type(create("examples.echo_engine:EchoEngine")).__name__ == "EchoEngine"


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("echo", "there are sim, sglang, trtllm, vllm, diffusion, or your own as module:Class"),
        ("no_such_module:Engine", "'no_such_module:Engine' cannot be imported: No module named 'no_such_module'"),
        ("examples.echo_engine:Nothing", "has no attribute 'Nothing'"),
        ("examples.echo_engine:", "'examples.echo_engine:'"),
        (":EchoEngine", "':EchoEngine'"),
        ("builtins:int", "does not implement headrace.workers.engine.Engine: no capabilities, start"),
        ("breaking_engine:Engine", "cannot be made: ZeroDivisionError"),
        ("breaking_engine:Missing", "cannot be imported: No module named 'not_installed'"),
    ],
)
def test_one_that_cannot_be_had_is_named_with_the_reason(
    name: str, told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "breaking_engine.py").write_text(
        "class Engine:\n    def __init__(self): 1 / 0\n\n\nclass Missing:\n    def __init__(self): import not_installed\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    try:
        with pytest.raises(EngineStartFailed) as caught:
            create(name)
    finally:
        sys.modules.pop("breaking_engine", None)
    assert told in str(caught.value)


def test_the_simulator_has_every_member_of_the_protocol() -> None:
    assert "submit" in MEMBERS
    assert "capabilities" in MEMBERS
    assert all(hasattr(SimEngine, member) for member in MEMBERS)
