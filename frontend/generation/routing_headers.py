"""Reads the routing headers of a request. Routers place requests by them; without a router they have no effect."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple

from headrace.frontend.errors import BadRequest
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.schema.common import Nvext, RouterHints
from headrace.jetstream.errors import SubjectError
from headrace.jetstream.subjects import check_token

SESSION_HEADER = b"x-session-id"
AFFINITY_HEADER = b"x-headrace-session-affinity"
WORKER_HEADER = b"x-headrace-worker"
REQUIRE_HEADER = b"x-headrace-require-labels"
PREFER_HEADER = b"x-headrace-prefer-labels"
TTFT_HEADER = b"x-headrace-ttft-target"
ITL_HEADER = b"x-headrace-itl-target"
EXPLAIN_HEADER = b"x-headrace-explain"
DECISION_HEADER = b"x-headrace-decision"
_READ = frozenset(
    {
        *(SESSION_HEADER, AFFINITY_HEADER, WORKER_HEADER, REQUIRE_HEADER, PREFER_HEADER, EXPLAIN_HEADER),
        *(TTFT_HEADER, ITL_HEADER),
    }
)

MAX_LABELS = 32
MAX_LABEL = 64
MAX_WEIGHT = 1000.0
MAX_TARGET_MS = 1e9
_SESSION = re.compile(r"[\x21-\x7e]{1,256}\Z")
_SWITCH = {"1": True, "true": True, "0": False, "false": False}

Affinity = Literal["soft", "hard"]


class Routing(NamedTuple):
    """The checked routing headers of one request."""

    session: str = ""
    affinity: Affinity = "soft"
    worker: str = ""
    require: list[str] = []
    prefer: dict[str, float] = {}
    explain: bool = False
    ttft_target_s: float | None = None
    itl_target_s: float | None = None
    agent_priority: int | None = None


def routing_of(exchange: HttpExchange, *, session_id: str | None, nvext: Nvext | None = None) -> Routing:
    """Read the routing headers. They win over the body's `session_id` and `nvext`. Raises BadRequest with header and value."""
    if nvext is None and _READ.isdisjoint(exchange.headers):
        return Routing(session=session_id or "")
    hints = (nvext.router if nvext is not None else None) or RouterHints()
    agent = nvext.agent_hints if nvext is not None else None
    affinity = _affinity(exchange)
    session = _session(exchange, session_id)
    if affinity == "hard" and not session:
        raise _bad(AFFINITY_HEADER, "hard", "a session id as well (x-session-id)")
    return Routing(
        session=session,
        affinity=affinity,
        worker=_worker(exchange),
        require=list(_labels(exchange, REQUIRE_HEADER)),
        prefer=_preferred(exchange),
        explain=_switch(exchange, EXPLAIN_HEADER),
        ttft_target_s=_target_s(exchange, TTFT_HEADER, hints.ttft_target),
        itl_target_s=_target_s(exchange, ITL_HEADER, hints.itl_target),
        agent_priority=agent.priority if agent is not None else None,
    )


def _target_s(exchange: HttpExchange, name: bytes, hint_ms: float | None) -> float | None:
    value, asked_ms = exchange.header(name), hint_ms
    if value is not None:
        try:
            asked_ms = float(value)
        except ValueError:
            asked_ms = math.nan
        if not 0 <= asked_ms <= MAX_TARGET_MS:
            raise _bad(name, value, f"milliseconds from 0 to {MAX_TARGET_MS:g}")
    return None if asked_ms is None else asked_ms / 1000.0


def _session(exchange: HttpExchange, session_id: str | None) -> str:
    value = exchange.header(SESSION_HEADER)
    if value is None:
        return session_id or ""
    if not _SESSION.match(value):
        raise _bad(SESSION_HEADER, value, "1 to 256 printable ASCII characters without spaces")
    return value


def _affinity(exchange: HttpExchange) -> Affinity:
    value = exchange.header(AFFINITY_HEADER)
    if value is None or value == "soft":
        return "soft"
    if value == "hard":
        return "hard"
    raise _bad(AFFINITY_HEADER, value, "soft or hard")


def _worker(exchange: HttpExchange) -> str:
    value = exchange.header(WORKER_HEADER)
    if value is None:
        return ""
    try:
        return check_token(value, "worker")
    except SubjectError:
        raise _bad(WORKER_HEADER, value, "the id of a worker: 1 to 64 of A-Z a-z 0-9 _ -") from None


def _labels(exchange: HttpExchange, name: bytes) -> dict[str, str]:
    """Return the text after `=` by label; empty without one."""
    value = exchange.header(name)
    if value is None:
        return {}
    labels = {}
    for item in value.split(","):
        label, _, weight = item.rpartition("=") if name == PREFER_HEADER and "=" in item else (item, "", "")
        label = label.strip()
        if not label or len(label) > MAX_LABEL:
            raise _bad(name, value, f"labels of 1 to {MAX_LABEL} characters, separated by commas")
        labels[label] = weight.strip()
    if len(labels) > MAX_LABELS:
        raise _bad(name, value, f"at most {MAX_LABELS} labels")
    return labels


def _preferred(exchange: HttpExchange) -> dict[str, float]:
    weights = {}
    for label, text in _labels(exchange, PREFER_HEADER).items():
        try:
            weight = float(text) if text else 1.0
        except ValueError:
            weight = math.nan
        if not 0 < abs(weight) <= MAX_WEIGHT:
            value = exchange.header(PREFER_HEADER) or ""
            raise _bad(PREFER_HEADER, value, f"a weight other than 0, up to {MAX_WEIGHT:g}, after {label}=")
        weights[label] = weight
    return weights


def _switch(exchange: HttpExchange, name: bytes) -> bool:
    value = exchange.header(name)
    if value is None:
        return False
    try:
        return _SWITCH[value.lower()]
    except KeyError:
        raise _bad(name, value, "1 or 0") from None


def _bad(name: bytes, value: str, wanted: str) -> BadRequest:
    header = name.decode()
    return BadRequest(f"{header} must be {wanted}, got {value[:200]!r}", param=header)
