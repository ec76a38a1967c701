"""Names jobs: their publishers' ids, the tokens of their subjects, and the ids of their runs."""

from __future__ import annotations

import hashlib
import re
import secrets

from headrace.broker.durable.errors import JobMalformed

LONGEST_NAME = 256
RUN_MARK = "~"  # between a job's id and the nonce of a delivery; allowed nowhere else

_PLAIN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_HASHED = "x-"  # names that begin so are hashed too, so that no plain name equals a hashed one


def check_name(name: str) -> str:
    """Return the id that a publisher gave a job. Raises JobMalformed for an empty, too long or unprintable one."""
    if not name or len(name) > LONGEST_NAME or not name.isprintable():
        raise JobMalformed(f"a job's id must be 1 to {LONGEST_NAME} printable characters, got {name[:80]!r}")
    return name


def job_token(name: str) -> str:
    """Return the token of a job in subjects: its name where that can be one, else `x-` and a hash of it."""
    if _PLAIN.match(name) and not name.startswith(_HASHED):
        return name
    return _HASHED + hashlib.sha256(name.encode()).hexdigest()[:40]


def job_id(tenant: str, name: str) -> str:
    """Return the id of a job inside Headrace, made of tenant and name, so that two tenants never share one. 32 characters."""
    return hashlib.sha256(f"{tenant}\0{name}".encode()).hexdigest()[:32]


def new_nonce() -> str:
    """Return a name for one delivery of a job to a carrier."""
    return secrets.token_hex(8)


def run_id(job: str, nonce: str, part: int = 0) -> str:
    """Return the request id under which a carrier submits a job; `part` numbers the requests of a job that is several."""
    return f"{job}{RUN_MARK}{nonce}" if not part else f"{job}{RUN_MARK}{nonce}-{part}"


def job_of_run(request_id: str) -> str:
    """Return the id of the job that a request belongs to; of one that belongs to none its own id."""
    return request_id.partition(RUN_MARK)[0]
