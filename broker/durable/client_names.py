"""Names jobs that frontends make for their clients.

A name holds a check of its tenant, so that a frontend tells a job that waits in the queue from one that never was, and a new
name the time at which it was made.
"""

from __future__ import annotations

import hashlib
import re

from headrace.broker.durable.errors import JobMalformed
from headrace.broker.jobs import new_id

LONGEST_KEY = 255

_MADE = re.compile(r"(h[sk]-[0-9a-f]{26})-[0-9a-f]{8}\Z")
_TIME = slice(3, 11)


def new_name(tenant: str) -> str:
    """Return a new name for a job."""
    return _checked(f"hs-{new_id()}", tenant)


def name_of_key(tenant: str, key: str) -> str:
    """Return the name of the job of an `Idempotency-Key`. Raises JobMalformed."""
    if not key or len(key) > LONGEST_KEY or not key.isprintable():
        raise JobMalformed(f"Idempotency-Key must be 1 to {LONGEST_KEY} printable characters, got {key[:80]!r}")
    return _checked(f"hk-{hashlib.sha256(key.encode()).hexdigest()[:26]}", tenant)


def is_made_for(name: str, tenant: str) -> bool:
    """Return whether a frontend made this name for a job of this tenant."""
    made = _MADE.match(name)
    return made is not None and _checked(made[1], tenant) == name


def made_at(name: str, tenant: str) -> int | None:
    """Return when a new name was made, Unix time; None for other names."""
    return int(name[_TIME], 16) if name.startswith("hs-") and is_made_for(name, tenant) else None


def _checked(name: str, tenant: str) -> str:
    check = hashlib.sha256(f"{name}/{tenant}".encode()).hexdigest()[:8]  # no tenant has a slash
    return f"{name}-{check}"
