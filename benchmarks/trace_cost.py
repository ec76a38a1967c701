"""Measures what tracing costs a frontend: CPU time per request without a tracer, with an unsampled, and with a sampled request.

Usage: python -m benchmarks.trace_cost [requests]
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from statistics import median
from typing import Any

from starlette.types import Receive, Scope, Send

from headrace.broker.ingress.timeline import RequestTimeline, Timelines
from headrace.broker.jobs import Job
from headrace.broker.messages.events import JobEvent
from headrace.broker.models.cards import ModelCard
from headrace.broker.protocol.job_record import NO_READER, JobRecord
from headrace.frontend.metrics import Metrics
from headrace.frontend.spans import SpanData
from headrace.frontend.tracer import OtlpExporter, Tracer, encode, traced

ROUNDS = 7
CARD = ModelCard(model="m", pool="p", context_length=4096, block_size=16, vocab_size=1000)
HEADERS = [(b"host", b"127.0.0.1"), (b"content-type", b"application/json"), (b"user-agent", b"x"), (b"accept", b"*/*")]


class Answered:
    """Leftovers of a request in its scope: the fields of its log line and one timeline."""

    level = "met"
    model = "m"
    first_token_s = 0.1
    attempts = 1

    def __init__(self, timeline: RequestTimeline) -> None:
        self.timelines = [timeline]

    def fields(self) -> dict[str, Any]:
        return {"model": "m", "tenant": "_", "class": "std", "prompt_tokens": 500, "completion_tokens": 100, "ttft_s": 0.1}


class ConvertOnly(OtlpExporter):
    """Encodes spans, and sends them nowhere."""

    def _send(self, spans: Sequence[SpanData]) -> bool:
        return bool(encode(spans, self._version))


def answered(book: Timelines, number: int) -> Answered:
    """Return a request that was placed, started, computed and answered."""
    job = Job(id=f"r{number}", card=CARD, prompt_tokens=500, max_tokens=100)
    timeline = book.begin(job, JobRecord(job.id, "p", 1, NO_READER, 0.0), 0.0, time.time())
    for kind in ("placed", "started", "prefilled"):
        timeline.add(JobEvent(kind, job.id, 1, "worker-1", 500, 100, by="router-1"), 0.0)  # type: ignore[arg-type]
    book.end(job.id, None, 1.0)
    return Answered(timeline)


async def cpu_s(app: Callable[[Scope, Receive, Send], Awaitable[None]], requests: Sequence[Answered]) -> float:
    """Run these requests, and return the CPU seconds of each on the average."""
    began = time.process_time()
    for request in requests:
        scope: Any = {"type": "http", "method": "POST", "headers": HEADERS, "headrace.request_id": "r"}
        scope |= {"headrace.status": 200, "headrace.summary": request}
        await app(scope, None, None)  # type: ignore[arg-type]
    return (time.process_time() - began) / len(requests)


async def inner(scope: Scope, receive: Receive, send: Send) -> None:
    """Do nothing, as the application below the tracer."""


async def measure(requests: int) -> None:
    """Measure and print."""
    book = Timelines("i", ended=requests)
    stories = [answered(book, number) for number in range(requests)]
    exporter = ConvertOnly("http://127.0.0.1:9/v1/traces")
    found: dict[str, list[float]] = {"not sampled": [], "sampled, on the request's path": [], "spans, afterwards": []}
    for _ in range(ROUNDS):
        plain = await cpu_s(inner, stories)
        for name, sample in (("not sampled", 0.0), ("sampled, on the request's path", 1.0)):
            tracer = Tracer(exporter, Metrics(), sample=sample, frontend="i", late_s=0.0)
            found[name].append(await cpu_s(traced(inner, tracer, "/v1/chat/completions"), stories) - plain)
            if sample:
                began = time.process_time()
                await tracer._export(tracer._take(float("inf")))
                found["spans, afterwards"].append((time.process_time() - began) / min(requests, 256))
    for name, values in found.items():
        print(f"{name:32} {median(values) * 1e6:7.1f} µs per request (median of {ROUNDS})")
    await exporter.close()


if __name__ == "__main__":
    asyncio.run(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 2000))
