"""Warnings that a broken sender cannot flood the log with."""

from __future__ import annotations

import structlog

log = structlog.get_logger(__name__)

AGAIN_S = 10.0
REMEMBERED = 1024


class LogThrottle:
    """Logs one line per event, worker and reason every `AGAIN_S`, with the number of lines left out."""

    def __init__(self) -> None:
        self._logged: dict[tuple[str, str, str], tuple[float, int]] = {}

    def warn(self, event: str, now_s: float, *, worker: str, **fields: object) -> None:
        """Log a warning, or count it as left out."""
        key = (event, worker, str(fields.get("reason", "")))
        logged = self._logged.get(key)
        if logged is not None and now_s - logged[0] < AGAIN_S:
            self._logged[key] = (logged[0], logged[1] + 1)
            return
        if logged is None and len(self._logged) >= REMEMBERED:
            del self._logged[next(iter(self._logged))]
        self._logged[key] = (now_s, 0)
        log.warning(event, worker=worker, **fields, **({"left_out": logged[1]} if logged and logged[1] else {}))
