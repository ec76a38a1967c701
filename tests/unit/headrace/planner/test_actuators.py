from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.base.errors import CommandError
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from headrace.planner.actuators import Actuator, CommandStarter, carried_out
from headrace.planner.plan import Action, Plan

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


class Leaving:
    """Lets all workers of a role leave but those of prefill, and notes who was named together."""

    def __init__(self) -> None:
        self.told: list[tuple[str, tuple[str, ...]]] = []

    async def leave(self, plan: Plan, role: str, workers: Sequence[str]) -> list[str]:
        self.told.append((role, tuple(workers)))
        if role == "prefill":
            raise CommandError("it may not have fewer")
        return list(workers)


async def test_where_something_else_runs_workers_those_of_a_role_leave_together_and_none_is_told_to_drain(
    connection: Connection, subjects: Subjects
) -> None:
    leaving = Leaving()
    gone = [("decode", "a"), ("prefill", "b"), ("decode", "c")]
    plan = replace(
        PLAN,
        supply={"decode": 4, "prefill": 2},
        desired={"decode": 2, "prefill": 1},
        actions=tuple(Action(kind="drain", role=role, worker=worker) for role, worker in gone),
    )
    done = await Actuator(connection, subjects, None, leaving).carry_out(plan)
    assert leaving.told == [("decode", ("a", "c")), ("prefill", ("b",))]
    assert done.desired == {"decode": 2, "prefill": 2}
    assert [one.worker for one in done.actions] == ["a", "c"]
