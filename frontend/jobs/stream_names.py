"""Names the jobs of durable answers and the events of their streams.

A name holds a check of its tenant, so that a frontend tells a job that waits in the queue from one that never was.
"""

from __future__ import annotations

import hashlib
import re

from headrace.broker.durable.names import job_token
from headrace.broker.jobs import new_id
from headrace.frontend.errors import BadRequest

LONGEST_KEY = 255

_MADE = re.compile(r"(h[sk]-[0-9a-f]{26})-([0-9a-f]{8})\Z")
_CHOSEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_EVENT = re.compile(r"([A-Za-z0-9_-]{1,64})\.(\d{1,9})\Z", re.ASCII)


def new_name(tenant: str) -> str:
    """Return a new name for a job."""
    return _checked(f"hs-{new_id()}", tenant)


def name_of_key(tenant: str, key: str) -> str:
    """Return the name of the job of an `Idempotency-Key`. Raises BadRequest."""
    if not key or len(key) > LONGEST_KEY or not key.isprintable():
        raise BadRequest(f"Idempotency-Key must be 1 to {LONGEST_KEY} printable characters, got {key[:80]!r}")
    return _checked(f"hk-{hashlib.sha256(key.encode()).hexdigest()[:26]}", tenant)


def chosen_name(value: str) -> str:
    """Return the name that a client chose for its job. Raises BadRequest."""
    if not _CHOSEN.match(value) or job_token(value) != value:
        raise BadRequest(f"Headrace-Job must be 1 to 64 of A-Z a-z 0-9 _ - and not begin with x-, got {value[:80]!r}")
    return value


def is_made_for(name: str, tenant: str) -> bool:
    """Say whether a frontend made this name for a job of this tenant."""
    made = _MADE.match(name)
    return made is not None and _checked(made[1], tenant) == name


def is_token(value: str) -> bool:
    """Say whether a value can be the token of a job."""
    return _CHOSEN.match(value) is not None


def event_id(token: str, number: int) -> bytes:
    """Return the id of an event, which a client sends back as `Last-Event-ID`."""
    return b"%b.%d" % (token.encode(), number)


def parse_event_id(value: str) -> tuple[str, int]:
    """Return token and number of an event's id. Raises BadRequest."""
    found = _EVENT.match(value)
    if found is None:
        raise BadRequest(f"Last-Event-ID must be the id of an event of a durable stream, got {value[:80]!r}")
    return found[1], int(found[2])


def _checked(name: str, tenant: str) -> str:
    check = hashlib.sha256(f"{name}/{tenant}".encode()).hexdigest()[:8]  # no tenant has a slash
    return f"{name}-{check}"
