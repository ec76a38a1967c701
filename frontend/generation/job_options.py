"""Job options common to generation and pooling: tenant, class, priority, deadline, routing."""

from __future__ import annotations

from typing import Literal, NamedTuple, Protocol, TypedDict

from headrace.frontend.auth.caller import Caller, caller_of
from headrace.frontend.errors import BadRequest
from headrace.frontend.generation.routing_headers import Routing, routing_of
from headrace.frontend.http.http_exchange import HttpExchange
from headrace.frontend.schema.common import Nvext
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.subjects import RequestClass

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
