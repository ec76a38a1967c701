"""What a worker tells orchestrators of itself."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.workers.operating.health import WorkerHealth
from headrace.workers.runtime.runtime import Runtime
from tests.support.runtime_bench import INFO, FakeEngine


def health(**info: Any) -> tuple[WorkerHealth, Any]:
    engine = FakeEngine()
    member = SimpleNamespace(worker="w", pool="p", role="aggregated", slots=4)
    state = SimpleNamespace(draining=False, withdrawn="", member=member, runs={})
    session = SimpleNamespace(state=state, registered=True, prefill_server=None)
    card = SimpleNamespace(model="m", kinds=["chat"])
    runtime = Runtime(engine, stall_s=60.0)  # type: ignore[arg-type]
    made = WorkerHealth(None, session, engine, runtime, replace(INFO, **info), card)  # type: ignore[arg-type]
    return made, session


async def test_ranks_that_share_a_model_are_told_where_there_are_several() -> None:
    assert "parallel" not in health()[0].describe().facts
    assert health(parallel={"tensor": 2, "pipeline": 4})[0].describe().facts["parallel"] == {"tensor": 2, "pipeline": 4}


@pytest.mark.parametrize(("withdrawn", "why"), [("sleep", "sleeps"), ("pause", "is paused"), ("role", "changes its role")])
async def test_a_worker_that_takes_nothing_by_an_operators_will_is_healthy_and_not_ready(withdrawn: str, why: str) -> None:
    made, session = health()
    assert made.describe().ready
    session.state.withdrawn = withdrawn
    told = made.describe()
    assert (told.ready, told.healthy, told.why) == (False, True, why)


async def test_a_worker_without_a_lease_is_neither_ready_nor_healthy() -> None:
    made, session = health()
    session.registered = False
    told = made.describe()
    assert (told.ready, told.healthy, told.why) == (False, False, "it holds no lease")
