"""What a worker tells orchestrators of itself."""

from __future__ import annotations

import mmap
from collections.abc import Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from headrace.workers.engine import Capabilities
from headrace.workers.errors import EngineError, UnsupportedByEngine
from headrace.workers.operations import NEEDED, EngineOperator, MemoryUse, WorkerHealth, measure
from headrace.workers.probes import EngineProbe
from headrace.workers.runtime.runtime import Runtime
from tests.support.runtime_bench import INFO, FakeEngine


def health(**info: Any) -> tuple[WorkerHealth, Any]:
    engine = FakeEngine()
    member = SimpleNamespace(worker="w", pool="p", role="aggregated", slots=4)
    presence = SimpleNamespace(draining=False, withdrawn="", member=member, lease=SimpleNamespace(held=True))
    session = SimpleNamespace(presence=presence, runs=SimpleNamespace(table={}), prefill_server=None)
    card = SimpleNamespace(model="m", kinds=["chat"])
    runtime = Runtime(engine, stall_s=60.0)  # type: ignore[arg-type]
    made = WorkerHealth(None, session, engine, runtime, replace(INFO, **info), card)  # type: ignore[arg-type]
    return made, session


@pytest.mark.parametrize(("withdrawn", "why"), [("sleep", "sleeps"), ("pause", "is paused"), ("role", "changes its role")])
async def test_a_worker_that_takes_nothing_by_an_operators_will_is_healthy_and_not_ready(withdrawn: str, why: str) -> None:
    made, session = health()
    assert made.describe().ready
    session.presence.withdrawn = withdrawn
    told = made.describe()
    assert (told.ready, told.healthy, told.why) == (False, True, why)


async def test_a_worker_without_a_lease_is_neither_ready_nor_healthy() -> None:
    made, session = health()
    session.presence.lease.held = False
    told = made.describe()
    assert (told.ready, told.healthy, told.why) == (False, False, "it holds no lease")


ALL = frozenset().union(*NEEDED.values())


class Operable(FakeEngine):
    """An engine that writes down its operations. `answers`: what it says, or raises."""

    def __init__(self, operations: frozenset[str] = ALL, levels: tuple[int, ...] = (1,)) -> None:
        super().__init__()
        self.capabilities = Capabilities(operations=operations, sleep_levels=levels)
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.answers: dict[str, Any] = {}

    async def healthy(self) -> None: ...

    async def control(self, op: str, args: Mapping[str, Any]) -> Mapping[str, Any]:
        self.asked.append((op, dict(args)))
        answer = self.answers.get(op, {})
        if isinstance(answer, Exception):
            raise answer
        return cast("Mapping[str, Any]", answer)


def operated(engine: Operable, *, engine_name: str = "fake", **more: Any) -> tuple[EngineOperator, Runtime, list[str]]:
    warmed: list[str] = []
    info = replace(INFO, engine=engine_name, **more)
    runtime = Runtime(engine, stall_s=60.0)  # type: ignore[arg-type]
    probe = EngineProbe(engine, runtime, info, token=1)  # type: ignore[arg-type]

    async def warm(role: str) -> None:
        assert not runtime.watchdog.suspended
        warmed.append("warm")

    return EngineOperator(engine, runtime, info, probe, warm=warm), runtime, warmed  # type: ignore[arg-type]


@pytest.mark.parametrize("operation", sorted(NEEDED))
async def test_what_an_engine_does_not_declare_is_refused_by_name(operation: str) -> None:
    for missing in NEEDED[operation]:
        able, _, _ = operated(Operable(ALL - {missing}))
        with pytest.raises(UnsupportedByEngine, match=operation):
            able.check(operation, level=1)
    operated(Operable())[0].check(operation, level=1)


async def test_a_level_of_sleep_that_it_does_not_have_is_refused_with_those_that_it_has() -> None:
    with pytest.raises(UnsupportedByEngine, match="has no sleep level 2; it has: 1"):
        operated(Operable())[0].check("sleep", level=2)


@pytest.mark.parametrize(
    ("engine", "operation", "says"),
    [
        ("vllm", "profile", "it can when started with `profiler_config`"),
        ("trtllm", "sleep", "the adapter for TensorRT-LLM"),
        ("mine", "sleep", "cannot do this: sleep$"),
    ],
)
async def test_a_refusal_says_what_it_would_take_where_that_is_known(engine: str, operation: str, says: str) -> None:
    with pytest.raises(UnsupportedByEngine, match=says):
        operated(Operable(frozenset()), engine_name=engine)[0].check(operation, level=1)


async def test_nothing_is_expected_of_an_engine_that_sleeps_until_it_is_warm_again() -> None:
    engine = Operable()
    able, runtime, warmed = operated(engine)
    report = await able.sleep(1)
    assert runtime.watchdog.suspended
    assert report["level"] == 1
    assert isinstance(report["host_bytes_freed"], int)
    assert not warmed
    await able.wake(1, role="decode")
    assert (runtime.watchdog.suspended, warmed) == (False, ["warm"])
    assert engine.asked == [("sleep", {"level": 1}), ("wake", {"level": 1})]


@pytest.mark.parametrize("operation", ["sleep", "pause"])
async def test_an_engine_that_fails_is_watched_again(operation: str) -> None:
    engine = Operable()
    engine.answers[operation] = RuntimeError("CUDA error")  # an exception of the engine's own
    able, runtime, _ = operated(engine)
    with pytest.raises(EngineError, match="CUDA error"):
        await (able.sleep(1) if operation == "sleep" else able.pause())
    assert not runtime.watchdog.suspended
    assert not runtime.exclusive.locked()


@pytest.mark.parametrize("answer", [{"result": False}, {"ok": False}])
async def test_a_cache_in_use_is_an_error(answer: dict[str, bool]) -> None:
    engine = Operable()
    engine.answers["reset_prefix_cache"] = answer
    with pytest.raises(EngineError, match="keeps its prefix cache"):
        await operated(engine)[0].reset_cache()


async def test_health_tells_of_an_engine_that_does_not_answer() -> None:
    able, _, _ = operated(Operable())
    healthy, report = await able.health(canary=True, timeout_s=0.05)  # nobody feeds this engine
    assert (healthy, report["why"]) == (False, "the engine did not answer within 0.05 s")
    assert (await able.health(canary=False, timeout_s=0.05))[0]


async def test_health_tells_why_an_engine_is_dead() -> None:
    able, runtime, _ = operated(Operable())
    runtime.watchdog.declare_dead("out of memory")
    assert await able.health(canary=True, timeout_s=1.0) == (
        False,
        {"engine": "fake", "version": INFO.version, "alive": False, "why": "out of memory"},
    )


async def test_a_log_level_is_passed_on_and_a_wrong_one_refused() -> None:
    engine = Operable()
    seen: list[str] = []

    def set_level(level: str) -> None:
        if level == "loud":
            raise KeyError(level)
        seen.append(level)

    runtime = Runtime(engine, stall_s=60.0)  # type: ignore[arg-type]
    able = EngineOperator(engine, runtime, INFO, cast("Any", None), warm=cast("Any", None), set_log_level=set_level)  # type: ignore[arg-type]
    able.set_log_level("debug")
    with pytest.raises(UnsupportedByEngine, match="'loud'"):
        able.set_log_level("loud")
    assert seen == ["debug"]
    with pytest.raises(UnsupportedByEngine):
        operated(engine)[0].set_log_level("debug")


def test_memory_is_measured_and_compared() -> None:
    before = measure().host
    with mmap.mmap(-1, 64 << 20) as held:  # pages of its own: what the heap gives may have been freed by tests before
        for page in range(0, len(held), mmap.PAGESIZE):
            held[page] = 1
        after = measure().host
    assert after - before > 32 << 20
    assert MemoryUse(5, 7).freed_until(MemoryUse(3, 9)) == {"host_bytes_freed": 2, "device_bytes_freed": -2}
    assert MemoryUse(5).freed_until(MemoryUse(3, 9)) == {"host_bytes_freed": 2}
