"""Decides what vLLM does with its own statistics: Prometheus series beside ours, and log lines where they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

LOG_EVERY_S = 10.0


def shows_metrics(args: Mapping[str, Any]) -> bool:
    """Return whether vLLM's series are on `/metrics`: unless `disable_log_stats=true` was given, which means both in vLLM."""
    return args.get("disable_log_stats") is not True


def no_prometheus() -> Any:
    """Return the stat logger that takes the place of vLLM's for Prometheus, which vLLM adds by itself, and shows nothing."""
    from vllm.v1.metrics.loggers import PrometheusStatLogger

    class NoPrometheus(PrometheusStatLogger):  # type: ignore[misc]  # vLLM is untyped to us
        def __init__(self, vllm_config: Any, engine_indexes: list[int] | None = None) -> None:
            """Register nothing."""
            self.engine_indexes = engine_indexes or [0]

        def record(self, *_stats: Any, **_more: Any) -> None:
            """Show nothing."""

        def log_engine_initialized(self) -> None:
            """Show nothing."""

        def record_sleep_state(self, *_state: Any, **_more: Any) -> None:
            """Show nothing."""

    return NoPrometheus


class StatsLog:
    """Has vLLM write its log lines of statistics, which it does when it is told to, until closed."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm
        self._timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._write)

    def _write(self) -> None:
        if self._llm.logger_manager is not None:
            self._llm.logger_manager.log()
        self._timer = asyncio.get_running_loop().call_later(LOG_EVERY_S, self._write)

    def close(self) -> None:
        """Write no more."""
        self._timer.cancel()
