"""Names jobs: their publishers' ids, the tokens of their subjects, and the ids of their runs."""

from __future__ import annotations

import hashlib
import re
import secrets
from functools import lru_cache
from itertools import count

import msgspec

from headrace.broker.durable.errors import JobMalformed
from headrace.broker.jobs import RUN_MARK, job_of_run, new_id

__all__ = [
    "LONGEST_NAME",
    "RUN_MARK",
    "JobRef",
    "Nonces",
    "check_name",
    "job_id",
    "job_of_run",
    "job_token",
    "new_nonce",
    "run_id",
]

LONGEST_NAME = 256

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_KNOWN = 4096  # names whose tokens and ids are remembered, as each job needs them several times
_HASHED = "x-"  # names that begin so are hashed too, so that no plain name equals a hashed one


def check_name(name: str) -> str:
    """Return the id that a publisher gave a job. Raises JobMalformed for an empty, too long or unprintable one."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise JobMalformed(f"a job's id must be 1 to {LONGEST_NAME} printable characters, got {name[:80]!r}")
    return name


@lru_cache(_KNOWN)
def job_token(name: str) -> str:
    """Return the token of a job in subjects: its name where that can be one, else `x-` and a hash of it."""
    if _PLAIN.match(name) and not name.startswith(_HASHED):
        return name
    return _HASHED + hashlib.sha256(name.encode()).hexdigest()[:40]


@lru_cache(_KNOWN)
def job_id(tenant: str, name: str) -> str:
    """Return the id of a job inside Headrace, made of tenant and name, so that two tenants never share one. 32 characters."""
    return hashlib.sha256(f"{tenant}\0{name}".encode()).hexdigest()[:32]


class JobRef(msgspec.Struct, frozen=True, kw_only=True):
    """A job by name, with what its result needs to say. `durable`: its end is that of its stream."""

    tenant: str
    name: str
    durable: bool = False
    batch: str = ""
    custom_id: str = ""

    @property
    def id(self) -> str:
        return job_id(self.tenant, self.name)

    @property
    def token(self) -> str:
        return job_token(self.name)


def new_nonce() -> str:
    """Return a name for one delivery of a job to a carrier."""
    return secrets.token_hex(8)


class Nonces:
    """Names the deliveries to one carrier: its own random part and a number, because a random part for each costs as much as
    reading the job."""

    def __init__(self) -> None:
        self._random = secrets.token_hex(6)
        self._numbers = count(1)

    def next(self) -> str:
        """Return a name that no other delivery has, here or elsewhere."""
        return f"{self._random}{next(self._numbers):06x}"


def run_id(job: str, nonce: str, part: int = 0) -> str:
    """Return the request id under which a carrier submits a job; `part` numbers the requests of a job that is several."""
    return f"{job}{RUN_MARK}{nonce}" if not part else f"{job}{RUN_MARK}{nonce}-{part}"


# Names jobs that frontends make for their clients.
#
# A name holds a check of its tenant, so that a frontend tells a job that waits in the queue from one that never was, and a
# new name the time at which it was made.

LONGEST_KEY = 255

_MADE = re.compile(r"(h[sk]-[0-9a-f]{26})-[0-9a-f]{8}\Z")
_TIME = slice(3, 11)


def new_name(tenant: str) -> str:
    return _checked(f"hs-{new_id()}", tenant)


def name_of_key(tenant: str, key: str) -> str:
    """Return the name of the job of an `Idempotency-Key`. Raises JobMalformed."""
    if not key or len(key) > LONGEST_KEY or not key.isprintable():
        raise JobMalformed(f"Idempotency-Key must be 1 to {LONGEST_KEY} printable characters, got {key[:80]!r}")
    return _checked(f"hk-{hashlib.sha256(key.encode()).hexdigest()[:26]}", tenant)


def is_made_for(name: str, tenant: str) -> bool:
    made = _MADE.match(name)
    return made is not None and _checked(made[1], tenant) == name


def made_at(name: str, tenant: str) -> int | None:
    """Return when a new name was made, Unix time; None for other names."""
    return int(name[_TIME], 16) if name.startswith("hs-") and is_made_for(name, tenant) else None


def _checked(name: str, tenant: str) -> str:
    check = hashlib.sha256(f"{name}/{tenant}".encode()).hexdigest()[:8]  # no tenant has a slash
    return f"{name}-{check}"
