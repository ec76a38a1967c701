"""Bundles what the parts of a carrier share."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

import structlog

from headrace.broker.durable.carrier.notices import JobNotices
from headrace.broker.durable.outside_end import OutsideEnds
from headrace.broker.durable.ports import CarriedBatches, JobRenderer
from headrace.broker.durable.result_store import ResultStore
from headrace.broker.errors import WireError
from headrace.broker.ingress.ingress import Ingress
from headrace.broker.settings import CarrierSettings
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

T = TypeVar("T")
log = structlog.get_logger()

LONGEST_RETRY_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class CarrierDeps:
    """Connection, judge and stores of one carrier. `wall` gives Unix time; `batches` is None where no batch is run."""

    messaging: Messaging
    subjects: Subjects
    ingress: Ingress
    renderer: JobRenderer
    batches: CarriedBatches | None
    results: ResultStore
    ends: OutsideEnds
    notices: JobNotices
    settings: CarrierSettings
    wall: Callable[[], float]


async def known(read: Callable[[], Awaitable[T]], *, what: str, retry_s: float) -> T:
    """Return what `read` returns, however often it has to be tried. Cancel it to give up."""
    while True:
        try:
            return await read()
        except (JetStreamError, WireError) as error:
            log.debug("job.unread", what=what, error=str(error))
            await asyncio.sleep(retry_s)
            retry_s = min(retry_s * 2, LONGEST_RETRY_S)
