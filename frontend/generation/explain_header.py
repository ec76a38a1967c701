"""The response header that says why a request was placed where it is, for requests that ask for it."""

from __future__ import annotations

import json
from typing import Any

import msgspec

from headrace.broker.messages import Candidate, Explanation, Row
from headrace.frontend.generation.routing_headers import DECISION_HEADER
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.ports import JobAnswer, JobPort

EXPLAIN_TIMEOUT_S = 0.5  # the first token waits for it
MAX_HEADER_BYTES = 4096  # servers and proxies refuse much longer ones
DIGITS = 4


class Explained:
    """An answer whose first rows come with the word of the router. The request has been placed by then, so it can be asked."""

    def __init__(self, answer: JobAnswer, port: JobPort, job: str, exchange: HttpExchange) -> None:
        """`job`: the one that is explained, the first one of the request."""
        self._answer = answer
        self._port = port
        self._job = job
        self._exchange = exchange
        self._told = False

    async def rows(self) -> list[Row]:
        rows = await self._answer.rows()
        if not self._told:
            self._told = True
            explanation = await self._port.explain(self._job, timeout_s=EXPLAIN_TIMEOUT_S)
            self._exchange.more_headers.append((DECISION_HEADER, decision_header(explanation)))
        return rows

    def cancel(self) -> None:
        self._answer.cancel()


def decision_header(explanation: Explanation) -> bytes:
    """One line of JSON: the chosen worker first, then the cheapest ones, as many as fit."""
    told: dict[str, Any] = _rounded(msgspec.to_builtins(explanation))
    told.pop("v", None)
    candidates = sorted(explanation.candidates, key=lambda c: (c.worker != explanation.worker, bool(c.why_not), c.cost_s))
    told["known"] = explanation.known
    while True:
        if candidates:
            told["candidates"] = [_told(candidate) for candidate in candidates]
        line = json.dumps(told, separators=(",", ":")).encode("ascii")
        if len(line) <= MAX_HEADER_BYTES or not candidates:
            return line[:MAX_HEADER_BYTES]
        candidates = candidates[: len(candidates) // 2]
        told["left_out"] = len(explanation.candidates) - len(candidates)
        told.pop("candidates")


def _told(candidate: Candidate) -> dict[str, Any]:
    return _rounded(msgspec.to_builtins(candidate))


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {key: round(value, DIGITS) if isinstance(value, float) else value for key, value in values.items()}
