"""Explains placements to the ingress that submitted the request: the `placed` event names the router to be asked."""

from __future__ import annotations

import asyncio

import structlog

from headrace.broker import metrics
from headrace.broker.codec import decode, encode
from headrace.broker.errors import WireError
from headrace.broker.messages import Explain, Explanation, JobEvent
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

log = structlog.get_logger()

LIMIT = 4096  # requests followed at once; beyond it the oldest one is forgotten


class Decisions:
    """Follows the placements of those requests that want an explanation."""

    def __init__(self, messaging: Messaging, subjects: Subjects) -> None:
        self._messaging = messaging
        self._subjects = subjects
        self._placed: dict[str, asyncio.Future[JobEvent]] = {}
        self._loop = asyncio.get_running_loop()

    def expect(self, request_id: str) -> None:
        """Follow a request. It must be called before the request is submitted."""
        self._placed[request_id] = self._loop.create_future()
        if len(self._placed) > LIMIT:
            self.forget(next(iter(self._placed)))

    def forget(self, request_id: str) -> None:
        """Stop following a request. A request that is not followed is fine."""
        if (placed := self._placed.pop(request_id, None)) is not None:
            placed.cancel()

    def on_event(self, event: JobEvent) -> None:
        """Note the placement of a followed request."""
        if event.kind != "placed" or not self._placed:
            return
        placed = self._placed.get(event.id)
        if placed is not None and not placed.done():
            placed.set_result(event)

    async def explain(self, request_id: str, *, timeout_s: float) -> Explanation:
        """Return the decision within `timeout_s`; one that cannot be had is `known=False`, with the reason."""
        placed = self._placed.get(request_id)
        if placed is None:
            return _unknown(request_id, "it was not asked for in time")
        event: JobEvent | None = None
        try:
            async with asyncio.timeout(timeout_s):
                event = await asyncio.shield(placed)
                if not event.by:
                    return Explanation(
                        id=request_id,
                        known=False,
                        state="placed",
                        worker=event.worker,
                        reason="no router was running: the worker took it itself",
                    )
                answer = await self._messaging.request(
                    self._subjects.control(event.by), encode(Explain(id=request_id)), timeout_s=timeout_s
                )
                return decode(Explanation, answer)
        except TimeoutError:
            why = "nobody said in time who placed it" if event is None else f"the router does not answer: {event.by} is silent"
            return _unknown(request_id, why)
        except WireError as error:
            metrics.MALFORMED.labels("explanation").inc()
            log.error("explanation.malformed", request_id=request_id, error=str(error))
            return _unknown(request_id, "the router's answer could not be read")
        except JetStreamError as error:
            return _unknown(request_id, f"the router does not answer: {error}")
        finally:
            self.forget(request_id)


def _unknown(request_id: str, why: str) -> Explanation:
    return Explanation(id=request_id, known=False, reason=why)
