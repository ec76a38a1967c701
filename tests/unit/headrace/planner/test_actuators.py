from __future__ import annotations

import sys
from pathlib import Path

import pytest

from headrace.errors import CommandError
from headrace.planner.actions import Action
from headrace.planner.actuators import CommandStarter, carried_out
from headrace.planner.plan import Plan

PLAN = Plan(
    at=0.0,
    model="m",
    pool="p",
    reason="forecast",
    desired={"aggregated": 3},
    supply={"aggregated": 1},
    actions=(Action(kind="start", role="aggregated"), Action(kind="start", role="aggregated")),
)


def test_what_failed_is_no_part_of_what_was_done() -> None:
    done = carried_out(PLAN, PLAN.actions[:1])
    assert done.desired == {"aggregated": 2}
    assert carried_out(PLAN, []).desired == {"aggregated": 1}
    drained = carried_out(PLAN, [Action(kind="drain", role="aggregated", worker="a")])
    assert drained.desired == {"aggregated": 0}


async def test_a_command_is_told_what_is_wanted(tmp_path: Path) -> None:
    script = tmp_path / "start"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"open({str(tmp_path / 'told')!r}, 'w').write(os.environ['HEADRACE_PLAN_ROLE'] + sys.stdin.read())\n"
    )
    script.chmod(0o755)
    await CommandStarter(str(script)).start(PLAN, "aggregated")
    told = (tmp_path / "told").read_text()
    assert told.startswith('aggregated{"model": "m", "pool": "p", "desired": {"aggregated": 3}')


@pytest.mark.parametrize("command", ["false", "/nowhere/at/all"])
async def test_a_command_that_fails_is_an_error(command: str) -> None:
    with pytest.raises(CommandError):
        await CommandStarter(command).start(PLAN, "aggregated")
