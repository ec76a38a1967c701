"""Writes operators' commands to a worker into the audit log. NATS does not say who has sent them."""

from __future__ import annotations

import structlog

from headrace.broker.messages.base import Record
from headrace.broker.worker.state import WorkerState

log = structlog.get_logger()

_SHOWN = ("role", "name", "level", "action", "grace_s")  # not the source of an adapter: an address may have a password in it


def note_command(state: WorkerState, command: Record) -> None:
    """Log a command that changes the worker, before it is carried out."""
    fields = {key: value for key in _SHOWN if (value := getattr(command, key, None)) is not None}
    log.warning(
        "audit.worker_command",
        command=command.__struct_config__.tag,
        worker=state.worker,
        pool=state.pool,
        model=state.member.model,
        **fields,
    )
