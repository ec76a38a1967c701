"""The count of tenants whose requests wait: a limit on one tenant protects others only if there are others."""

from __future__ import annotations

import structlog

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import BATCH_CLASSES
from headrace.jetstream.topology import request_stream
from headrace.router.session.deps import RouterDeps
from headrace.router.session.state import RouterState

log = structlog.get_logger()

CROWDED = 256  # requests held, from which on it matters whose they are


class TenantCount:
    """Tells the scheduler whether several tenants have interactive requests, in the window or in the streams behind it.

    Batch requests are bounded by a window of their own and take no turn from others.
    """

    def __init__(self, deps: RouterDeps, state: RouterState) -> None:
        self._messaging = deps.messaging
        self._subjects = deps.subjects
        self._pool = deps.pool
        self._window = state.window
        self._scheduler = state.scheduler

    async def refresh(self) -> None:
        """Count anew. With a short window there is nothing to protect, and with an error the last count stays."""
        held = self._window.counts
        if sum(count for name, count in held.items() if name not in BATCH_CLASSES) < CROWDED:
            self._scheduler.several_tenants = False
            return
        stream = request_stream(self._subjects, "std")
        try:
            counts = await self._messaging.subject_counts(stream, self._subjects.req_filter_all(self._pool))
        except JetStreamError as error:
            log.debug("crowd.unknown", pool=self._pool, error=str(error))
            return
        waiting = map(self._subjects.parse_req, counts)
        tenants = {subject.tenant for subject in waiting if subject.request_class not in BATCH_CLASSES}
        self._scheduler.several_tenants = len(tenants) > 1
