from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from msgspec.structs import replace

from headrace.base.errors import CommandError
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from headrace.planner.actuators import Actuator, by_command
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


async def test_a_command_is_told_what_is_wanted(tmp_path: Path) -> None:
    script = tmp_path / "start"
    script.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"open({str(tmp_path / 'told')!r}, 'w').write(os.environ['HEADRACE_PLAN_ROLE'] + sys.stdin.read())\n"
    )
    script.chmod(0o755)
    await by_command(str(script))(PLAN, "aggregated")
    told = (tmp_path / "told").read_text()
    assert told.startswith('aggregated{"model": "m", "pool": "p", "desired": {"aggregated": 3}')


@pytest.mark.parametrize("command", ["false", "/nowhere/at/all"])
async def test_a_command_that_fails_is_an_error(command: str) -> None:
    with pytest.raises(CommandError):
        await by_command(command)(PLAN, "aggregated")


async def test_where_something_else_runs_workers_those_of_a_role_leave_together_and_none_is_told_to_drain(
    connection: Connection, subjects: Subjects
) -> None:
    told: list[tuple[str, tuple[str, ...]]] = []

    async def leave(plan: Plan, role: str, workers: Sequence[str]) -> None:
        told.append((role, tuple(workers)))
        if role == "prefill":
            raise CommandError("it may not have fewer")

    gone = [("decode", "a"), ("prefill", "b"), ("decode", "c")]
    plan = replace(
        PLAN,
        supply={"decode": 4, "prefill": 2},
        desired={"decode": 2, "prefill": 1},
        actions=tuple(Action(kind="drain", role=role, worker=worker) for role, worker in gone),
    )
    done = await Actuator(connection, subjects, None, leave).carry_out(plan)
    assert told == [("decode", ("a", "c")), ("prefill", ("b",))]
    assert done.desired == {"decode": 2, "prefill": 2}
    assert [one.worker for one in done.actions] == ["a", "c"]


async def test_a_start_that_failed_is_no_part_of_the_plan_that_was_carried_out(
    connection: Connection, subjects: Subjects
) -> None:
    left = iter(["one"])

    async def start(plan: Plan, role: str) -> str:
        if (name := next(left, None)) is None:
            raise CommandError("no machine is free")
        return name

    done = await Actuator(connection, subjects, start).carry_out(PLAN)
    assert (done.desired, len(done.actions)) == ({"aggregated": 2}, 1)
    assert (await Actuator(connection, subjects, None).carry_out(PLAN)).desired == {"aggregated": 1}
