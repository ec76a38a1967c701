"""Tells the frontends what an operator's command has changed, so that it stands in their audit logs."""

from __future__ import annotations

import contextlib
import getpass

from headrace.broker.codec import encode
from headrace.broker.messages import OperatorAct
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects


def announce(messaging: Messaging, names: Subjects, command: str, **details: object) -> None:
    """Tell of a command, once and unconfirmed: where no frontend runs, nothing writes it down.

    `details` say what was changed; they must hold no secret and no prompt.
    """
    told = {name: str(value)[:1024] for name, value in details.items()}
    with contextlib.suppress(JetStreamError):
        messaging.send(names.audit(), encode(OperatorAct(command=command, by=user_name(), details=told)))


def user_name() -> str:
    """Return the name of the user who runs this process, empty where it has none."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""
