"""Reports the waits of suspects for workers that are due back."""

from __future__ import annotations

import structlog

from headrace.router.session import metrics

log = structlog.get_logger()


class SuspectWaits:
    """Times the waits of one router's window. Times are seconds of the caller's clock."""

    def __init__(self, pool: str) -> None:
        self._pool = pool
        self._began_s: float | None = None

    def note(self, suspects: int, now_s: float) -> None:
        """Note how many suspects wait now. The first of them begins a wait, none ends it."""
        if suspects and self._began_s is None:
            self._began_s = now_s
            log.warning("suspects.held", pool=self._pool, suspects=suspects, reason="lost workers are due back")
        elif not suspects and self._began_s is not None:
            waited_s, self._began_s = now_s - self._began_s, None
            metrics.SUSPECTS_HELD_S.observe(waited_s)
            log.info("suspects.released", pool=self._pool, waited_s=round(waited_s, 3))
