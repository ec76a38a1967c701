"""vLLM's own statistics: shown unless switched off, and written to the log where asked for."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace

import pytest

from headrace.workers.vllm import stats_log
from headrace.workers.vllm.stats_log import StatsLog, shows_metrics


def test_its_series_are_shown_unless_its_statistics_were_switched_off() -> None:
    assert shows_metrics({})
    assert shows_metrics({"disable_log_stats": False})
    assert not shows_metrics({"disable_log_stats": True})


async def test_its_log_lines_come_until_it_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_log, "LOG_EVERY_S", 0.01)
    written: list[int] = []
    log = StatsLog(SimpleNamespace(logger_manager=SimpleNamespace(log=lambda: written.append(1))))
    await asyncio.sleep(0.1)
    assert len(written) > 1
    log.close()
    count = len(written)
    await asyncio.sleep(0.05)
    assert len(written) == count
