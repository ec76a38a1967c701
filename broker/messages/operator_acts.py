"""Defines what is told about operators' commands (`hr.audit`), for the audit logs of frontends."""

from __future__ import annotations

import msgspec

from headrace.broker.messages.base import Name, Record


class OperatorAct(Record, frozen=True, omit_defaults=True, kw_only=True):
    """A command of an operator that has changed something. `by` is the user's name as the command's machine says it."""

    command: Name
    by: Name = ""
    details: dict[Name, Name] = msgspec.field(default_factory=dict)
