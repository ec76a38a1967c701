"""Writes the audit log: who was refused and why, and what operators changed. Its events begin with `audit.`."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import structlog

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.keys.records import KeyRecord
from headrace.broker.messages import OperatorAct
from headrace.frontend.auth.caller import caller_of
from headrace.jetstream.ports import Message

log = structlog.get_logger()

MOST_PER_S = 20  # refusals that are logged; more are counted, so that an attack cannot fill the disk
REFUSALS = frozenset(
    {
        *("missing_api_key", "invalid_api_key", "permission_denied", "model_not_allowed", "tenant_not_allowed"),
        *("host_refused", "origin_refused", "rate_limit_exceeded"),
    }
)


class AuditLog:
    """The audit log of one frontend."""

    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._written = self._left_out = 0

    def refused(self, scope: Any, code: str, **fields: object) -> None:
        """Log the refusal of a request, with its key's public id and its sender's address."""
        second = int(self._clock())
        if second != self._second:
            if self._left_out:
                log.warning("audit.left_out", refusals=self._left_out)
            self._second, self._written, self._left_out = second, 0, 0
        if self._written >= MOST_PER_S:
            self._left_out += 1
            return
        self._written += 1
        log.warning("audit.refused", code=code, **who(scope), **fields)


def who(scope: Any) -> dict[str, object]:
    """Return the fields that say who sent a request: key, tenant, address."""
    caller = caller_of(scope)
    key = caller.key if caller is not None else scope.get("headrace.bad_key")
    client = scope.get("client")
    return {
        "key": key or "none",
        "tenant": scope.get("headrace.tenant") or "none",
        "peer": client[0] if client else "unknown",
        "request_id": scope.get("headrace.request_id", ""),
    }


def key_changed(old: KeyRecord | None, new: KeyRecord | None) -> None:
    """Log what became of a key in the store. `created_by` is what its maker's machine says."""
    record = new or old
    if record is None or old == new:
        return
    if old is None:
        event = "audit.key_created"
    elif new is None:
        event = "audit.key_deleted"
    elif new.revoked and not old.revoked:
        event = "audit.key_revoked"
    else:
        event = "audit.key_rotated" if new.hashes != old.hashes else "audit.key_changed"
    log.warning(event, key=record.id, name=record.name, tenant=record.tenant, scopes=record.scopes, by=record.created_by)


def operator_acted(message: Message) -> None:
    """Log a command of an operator, as the process that ran it has told."""
    try:
        act = decode(OperatorAct, message.data)
    except WireError as error:
        log.warning("audit.unreadable", error=str(error))
        return
    log.warning("audit.operator_command", command=act.command, by=act.by, details=act.details)
