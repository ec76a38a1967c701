"""Makes commands start sooner: the garbage collector runs less often, and structlog is imported without rich."""

from __future__ import annotations

import gc

from headrace.jetstream.core.hidden_imports import hidden

IMPORTING = (50_000, 50, 100)
"""Thresholds of the garbage collector while modules are loaded, when there is nothing to collect. A part sets its own once it
has started."""


def import_patiently() -> None:
    """Make the garbage collector run less often from now on."""
    gc.set_threshold(*IMPORTING)


def import_structlog() -> None:
    """Import structlog without rich, which some engines install.

    rich is a fifth of what a part imports. It is used for tracebacks with all local variables, prompts included, which no log
    may have (`headrace.logs`).
    """
    with hidden("rich"):
        import structlog  # noqa: F401
