"""Names the events of durable streams, and checks the names that clients give."""

from __future__ import annotations

import re

from headrace.broker.durable.names import job_token
from headrace.frontend.errors import BadRequest

_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_EVENT = re.compile(r"([A-Za-z0-9_-]{1,64})\.(\d{1,9})\Z", re.ASCII)


def chosen_name(value: str) -> str:
    """Return the name that a client chose for its job. Raises BadRequest."""
    if not is_token(value) or job_token(value) != value:
        raise BadRequest(f"Headrace-Job must be 1 to 64 of A-Z a-z 0-9 _ - and not begin with x-, got {value[:80]!r}")
    return value


def is_token(value: str) -> bool:
    """Return whether a value can be the token of a job."""
    return _TOKEN.match(value) is not None


def event_id(token: str, number: int) -> bytes:
    """Return the id of an event, which a client sends back as `Last-Event-ID`."""
    return b"%b.%d" % (token.encode(), number)


def parse_event_id(value: str) -> tuple[str, int]:
    """Return token and number of an event's id. Raises BadRequest."""
    found = _EVENT.match(value)
    if found is None:
        raise BadRequest(f"Last-Event-ID must be the id of an event of a durable stream, got {value[:80]!r}")
    return found[1], int(found[2])
