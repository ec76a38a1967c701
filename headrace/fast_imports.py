"""What makes every command start sooner: a patient garbage collector, and structlog without what it would import for looks."""

from __future__ import annotations

import gc

from headrace.jetstream.core.hidden_imports import hidden

IMPORTING = (50_000, 50, 100)
"""Thresholds of the collector while modules are loaded, which it would look at again and again to find nothing. A part sets its
own once it has started."""


def import_patiently() -> None:
    """Let the collector look less often from now on."""
    gc.set_threshold(*IMPORTING)


def import_structlog() -> None:
    """Import structlog as where there is no rich, which some engines bring: a fifth of what a part imports, for tracebacks with
    all local variables, prompts too, that no log of ours may have (`headrace.logs`)."""
    with hidden("rich"):
        import structlog  # noqa: F401
