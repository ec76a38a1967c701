"""Stored jobs over a fake ingress: renders them as a carrier does, and feeds them the rows of a script."""

from __future__ import annotations

import json
from collections.abc import Mapping
from itertools import accumulate
from typing import Any

import msgspec

from headrace.broker.durable.names import run_id
from headrace.broker.durable.stored_job import StoredJob
from headrace.broker.messages.frames import Row
from headrace.frontend.job_renderer import ApiRenderer, RenderedAnswer
from tests.support.frontend.fakes import FakeIngress

STORED = 1_700_000_000.0
FAR = 4_000_000_000.0
NONCE = "0123456789abcdef"


def stored(body: Mapping[str, Any] | bytes, endpoint: str = "/v1/chat/completions", **more: Any) -> StoredJob:
    raw = body if isinstance(body, bytes) else json.dumps(body).encode()
    fields = {"tenant": "_", "deadline": FAR, "created": STORED, **more}
    return StoredJob(name="j1", endpoint=endpoint, body=raw, **fields)


async def rendered(renderer: ApiRenderer, job: StoredJob, nonce: str = NONCE) -> RenderedAnswer:
    return await renderer.render(job, run_id(job.id, nonce))


async def rows_of(ingress: FakeIngress, answer: RenderedAnswer) -> list[list[Row]]:
    """Submit the requests one after the other; their choices are counted over all of them."""
    found = []
    for base, request in zip(accumulate((r.choices for r in answer.requests), initial=0), answer.requests, strict=False):
        for step in ingress.script(request):
            assert not isinstance(step, Exception)
            found.append([msgspec.structs.replace(row, choice=base + row.choice) for row in step])
    return [rows for rows in found if rows]


async def run(ingress: FakeIngress, answer: RenderedAnswer) -> list[bytes]:
    """Run a job to its end. Returns its events."""
    events = []
    for rows in await rows_of(ingress, answer):
        assert answer.open
        events += answer.take(rows)
    assert not answer.open
    return events + await answer.finish()
