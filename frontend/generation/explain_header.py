"""Adds a response header that explains the router's placement, for requests that ask for it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headrace.broker.ingress.journey import Journey
from headrace.broker.messages import Explanation, Row
from headrace.frontend.generation.routing_headers import DECISION_HEADER
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.ports import JobAnswer, JobPort

EXPLAIN_TIMEOUT_S = 0.5  # the first token waits for this long
MAX_HEADER_BYTES = 4096  # servers and proxies refuse much longer ones
DIGITS = 4


class Explained:
    """An answer that fetches the router's explanation with its first rows, when the request has been placed."""

    def __init__(self, answer: JobAnswer, port: JobPort, job: str, exchange: HttpExchange) -> None:
        """`job` is the id of the job to explain, the first one of the request."""
        self._answer = answer
        self._port = port
        self._job = job
        self._exchange = exchange
        self._explained = False

    @property
    def journey(self) -> Journey | None:
        """Return None: the answers below are followed one by one."""
        return None

    async def rows(self) -> list[Row]:
        rows = await self._answer.rows()
        if not self._explained:
            self._explained = True
            explanation = await self._port.explain(self._job, timeout_s=EXPLAIN_TIMEOUT_S)
            self._exchange.more_headers.append((DECISION_HEADER, decision_header(explanation)))
        return rows

    def cancel(self) -> None:
        self._answer.cancel()


def decision_header(explanation: Explanation) -> bytes:
    """Return the explanation as one line of JSON, with the chosen worker first, then the cheapest ones that fit."""
    values: dict[str, Any] = _rounded(msgspec.to_builtins(explanation))
    values.pop("v", None)
    candidates = sorted(explanation.candidates, key=lambda c: (c.worker != explanation.worker, bool(c.why_not), c.cost_s))
    values["known"] = explanation.known
    while True:
        if candidates:
            values["candidates"] = [_rounded(msgspec.to_builtins(candidate)) for candidate in candidates]
        line = json.dumps(values, separators=(",", ":")).encode("ascii")
        if len(line) <= MAX_HEADER_BYTES or not candidates:
            return line[:MAX_HEADER_BYTES]
        candidates = candidates[: len(candidates) // 2]
        values["left_out"] = len(explanation.candidates) - len(candidates)
        values.pop("candidates")


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, DIGITS) if isinstance(value, float) else value for key, value in values.items()}
