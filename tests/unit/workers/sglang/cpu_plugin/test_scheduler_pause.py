from __future__ import annotations

from types import SimpleNamespace

import pytest

from headrace.workers.sglang.cpu_plugin import scheduler_pause


@pytest.mark.parametrize(
    ("idle", "pauses"), [(False, [scheduler_pause.PAUSE_S]), (True, [])], ids=["it waits", "it has nothing"]
)
def test_only_a_scheduler_that_waits_for_pages_is_paused(
    idle: bool, pauses: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    slept: list[float] = []
    monkeypatch.setattr(scheduler_pause, "time", SimpleNamespace(sleep=slept.append))
    turns: list[object] = []
    scheduler = SimpleNamespace(is_fully_idle=lambda: idle)
    scheduler_pause.pause(turns.append, scheduler)
    assert (turns, slept) == ([scheduler], pauses)


def test_a_paused_scheduler_rests_in_each_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(scheduler_pause, "time", SimpleNamespace(sleep=slept.append))
    turns: list[object] = []
    scheduler = SimpleNamespace()
    scheduler_pause.rest(turns.append, scheduler)
    assert (turns, slept) == ([scheduler], [scheduler_pause.PAUSE_S])
