"""Makes a table of the attacks out of the attempts."""

from __future__ import annotations

from tests.attacks import by_answers, by_messages, on_connections, on_machines, over_http, over_nats, with_models
from tests.attacks.attempt import Attempt

_WORDS = ("web", "keys", "quotas", "NATS", "TLS", "tenancy", "input")  # of attempts that belong to no finding of the audit


def _order(attempt: Attempt) -> tuple[int, int]:
    if attempt.finding in _WORDS:
        return 9, _WORDS.index(attempt.finding)
    return "CHML".index(attempt.finding[0]), int(attempt.finding[1:])


ALL: tuple[Attempt, ...] = tuple(
    sorted(
        (
            attempt
            for one in (over_http, on_connections, by_messages, over_nats, by_answers, with_models, on_machines)
            for attempt in one.ATTEMPTS
        ),
        key=_order,
    )
)


def rows() -> list[str]:
    """Return the lines of the table, without its head."""
    return [_row(attempt) for attempt in ALL]


def table() -> str:
    """Return the whole table."""
    return "\n".join(
        ["| finding | who, what | result now | command: `pytest …` | fails without |", "|---|---|---|---|---|", *rows()]
    )


def _row(attempt: Attempt) -> str:
    tests = "<br>".join(f"`tests/{test}`" for test in attempt.tests)
    cells = (attempt.finding, f"{attempt.who}: {attempt.tries}", attempt.result, tests, f"yes: {attempt.without}")
    return "| " + " | ".join(cells) + " |"
