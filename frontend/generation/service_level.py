"""Judges an ended answer by the operator's targets: the time to its first token, and the time per token after that."""

from __future__ import annotations

from headrace.frontend.metrics import Level

TOO_MANY_REQUESTS = 429


def service_level(*, first_token_s: float, per_token_s: float | None, target_first_s: float, target_token_s: float) -> Level:
    """Return how an answer compares with its targets; a target of 0 is met by every answer.

    `per_token_s`: the mean time per token after the first; None where there is one token. What is late at first is called that,
    however fast it goes on.
    """
    if 0 < target_first_s < first_token_s:
        return "first_token_late"
    if per_token_s is not None and 0 < target_token_s < per_token_s:
        return "tokens_late"
    return "met"


def counts_as_failed(status: int) -> bool:
    """Return True for an error that is not the client's own: its request was refused for lack of room, or broke here."""
    return status >= 500 or status == TOO_MANY_REQUESTS
