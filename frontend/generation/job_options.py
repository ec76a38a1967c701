"""Job options common to generation and pooling: tenant, class, priority, deadline, and the routing headers."""

from __future__ import annotations

import math
import re
from typing import Literal, NamedTuple, Protocol, TypedDict

from headrace.frontend.auth.caller import Caller, caller_of
from headrace.frontend.chat_schema import Nvext, RouterHints
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.errors import SubjectError
from headrace.jetstream.subjects import RequestClass, check_token

# Reads the routing headers of a request. Routers place requests by them; without a router they have no effect.

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


TIMEOUT_HEADER = b"x-request-timeout-s"
MOST_PRIORITY = 2**31 - 1


class Tier(NamedTuple):
    """A service tier of OpenAI's API: the class it queues in, and its name in the answer."""

    request_class: RequestClass
    name: str


STANDARD = Tier("std", "default")
TIERS: dict[str, Tier] = {
    "auto": STANDARD,
    "default": STANDARD,
    "scale": STANDARD,
    "flex": Tier("batch", "flex"),
    "priority": Tier("hi", "priority"),
}


def tier_of(name: str | None) -> Tier:
    """Return the tier of this name; an unknown name or None is the standard tier."""
    return TIERS.get(name or "auto", STANDARD)


class RequestOptions(Protocol):
    """The fields of a request's body that become job options."""

    @property
    def timeout(self) -> float | None: ...
    @property
    def service_tier(self) -> str | None: ...
    @property
    def priority(self) -> int | None: ...


class JobOptions(TypedDict):
    """The fields of `headrace.broker.jobs.Job` that are the same for all jobs of a request."""

    name: str
    request_class: RequestClass
    tenant: str
    priority: int
    deadline_s: float
    session: str
    affinity: Literal["soft", "hard"]
    worker: str
    ttft_target_s: float | None
    itl_target_s: float | None
    agent_priority: int | None
    require: list[str]
    prefer: dict[str, float]


def job_options_of(
    request: RequestOptions,
    exchange: HttpExchange,
    settings: FrontendSettings,
    *,
    session_id: str | None,
    nvext: Nvext | None = None,
) -> tuple[JobOptions, Routing]:
    """Return the job options of a request. `session_id` and `nvext` are the body's. Raises BadRequest.

    Call it before the first job takes the request's own id.
    """
    deadline_s = deadline_of(request.timeout, exchange, settings)
    tier = tier_of(request.service_tier)
    routing = routing_of(exchange, session_id=session_id, nvext=nvext)
    caller = caller_of(exchange.scope)
    if caller is not None:
        _check_rights(caller, request, tier, routing)
    options = JobOptions(
        name=exchange.name,
        request_class=tier.request_class,
        tenant=exchange.tenant,
        priority=min(request.priority or 0, MOST_PRIORITY),
        deadline_s=deadline_s,
        session=routing.session,
        affinity=routing.affinity,
        worker=routing.worker,
        ttft_target_s=routing.ttft_target_s,
        itl_target_s=routing.itl_target_s,
        agent_priority=routing.agent_priority,
        require=routing.require,
        prefer=routing.prefer,
    )
    return options, routing


def _check_rights(caller: Caller, request: RequestOptions, tier: Tier, routing: Routing) -> None:
    """Raise Forbidden if the request takes more than its turn, or chooses its worker, and its key does not cover that."""
    if tier.request_class == "hi":
        caller.need("priority", f"service_tier {request.service_tier!r}")
    if request.priority:
        caller.need("priority", "the field priority")
    if routing.agent_priority is not None:
        caller.need("priority", "the field nvext.agent_hints.priority")
    if routing.worker or routing.require or routing.prefer:
        caller.need("direct", "choosing workers by headers")
    if routing.explain:
        caller.need("direct", "x-headrace-explain")


def deadline_of(wanted: float | None, exchange: HttpExchange, settings: FrontendSettings) -> float:
    """Return the deadline in seconds from now. The header wins over `wanted`, the body's timeout. Raises BadRequest."""
    asked = exchange.header(TIMEOUT_HEADER)
    if asked is not None:
        name = TIMEOUT_HEADER.decode()
        try:
            wanted = float(asked)
        except ValueError:
            raise BadRequest(f"{name} must be a number of seconds, got {asked!r}", param=name) from None
        if not 0 < wanted < float("inf"):
            raise BadRequest(f"{name} must be above 0, got {asked}", param=name)
    return min(wanted, settings.max_deadline_s) if wanted is not None else settings.deadline_s
