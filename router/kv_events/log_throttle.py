"""Warnings that a broken sender cannot flood the log with."""

from __future__ import annotations

import structlog

log = structlog.get_logger(__name__)

AGAIN_S = 10.0
REMEMBERED = 1024


class LogThrottle:
    """One line per event, worker and reason every `AGAIN_S`, with the number of those left out."""

    def __init__(self) -> None:
        self._said: dict[tuple[str, str, str], tuple[float, int]] = {}

    def warn(self, event: str, now_s: float, *, worker: str, **fields: object) -> None:
        key = (event, worker, str(fields.get("reason", "")))
        said = self._said.get(key)
        if said is not None and now_s - said[0] < AGAIN_S:
            self._said[key] = (said[0], said[1] + 1)
            return
        if said is None and len(self._said) >= REMEMBERED:
            del self._said[next(iter(self._said))]
        self._said[key] = (now_s, 0)
        log.warning(event, worker=worker, **fields, **({"left_out": said[1]} if said and said[1] else {}))
