"""Makes the ids of workers."""

from __future__ import annotations

import secrets
import time

from headrace.jetstream.subjects import check_token

ANY_WORKER = "*"  # the worker of a login that all workers of a pool use


def worker_id(name: str | None, login: str | None = None) -> str:
    """Return an id that is unique per process start: the given name, or a random one, plus an epoch.

    `login`: the id of the one worker that may use the process's login at the NATS server. It was made for this start.
    """
    if login and login != ANY_WORKER:
        return check_token(login, "worker of the login")
    base = check_token(name, "worker name") if name else f"w-{secrets.token_hex(3)}"
    return f"{base}-{int(time.time()):x}{secrets.token_hex(2)}"
