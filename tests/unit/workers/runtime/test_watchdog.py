"""The watchdog: its limit follows the steps, waits for other workers are no stalls, and nothing is expected in a pause."""

from __future__ import annotations

import asyncio

import pytest

from headrace.workers.runtime import stall_limit
from headrace.workers.runtime.watchdog import EngineWork, Watchdog
from tests.support.virtual_time import in_virtual_time


class Engine:
    async def died(self) -> str:
        return await asyncio.get_running_loop().create_future()


def stalls(monkeypatch: pytest.MonkeyPatch, *, waiting: bool = False, suspended: int = 0, resumed: int = 0) -> bool:
    found: list[bool] = []

    async def main() -> None:
        found.append(await _stalls(monkeypatch, waiting=waiting, suspended=suspended, resumed=resumed))

    in_virtual_time(main)
    return found[0]


async def _stalls(monkeypatch: pytest.MonkeyPatch, *, waiting: bool, suspended: int, resumed: int) -> bool:
    """Whether an engine counts as dead half a second after quick steps, where the setting alone would allow 0.9 s."""
    monkeypatch.setattr(stall_limit, "LEAST_S", 0.05)
    watchdog = Watchdog(Engine(), EngineWork(lambda: 1, lambda: waiting), stall_s=0.9)
    monkeypatch.setattr(watchdog, "_check_every_s", 0.01)
    watchdog.begin()
    for _ in range(3):
        await asyncio.sleep(0.001)
        watchdog.stepped()
    for _ in range(suspended):
        watchdog.suspend()
    for _ in range(resumed):
        watchdog.resume()
    task = asyncio.create_task(watchdog.watch_stall())
    await asyncio.wait([task], timeout=0.5)
    task.cancel()
    return watchdog.dead.done()


def test_an_engine_that_made_quick_steps_is_missed_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    assert stalls(monkeypatch)


def test_a_sequence_that_waits_for_another_worker_has_the_time_of_the_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not stalls(monkeypatch, waiting=True)


@pytest.mark.parametrize(("suspended", "resumed", "missed"), [(1, 0, False), (2, 1, False), (2, 2, True), (1, 3, True)])
def test_every_reason_not_to_expect_steps_has_to_end(
    monkeypatch: pytest.MonkeyPatch, suspended: int, resumed: int, missed: bool
) -> None:
    assert stalls(monkeypatch, suspended=suspended, resumed=resumed) is missed
