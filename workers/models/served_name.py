"""Names the model that a worker serves, as far as its settings tell."""

from __future__ import annotations

from headrace.workers.settings import WorkerSettings


def served_name(settings: WorkerSettings) -> str:
    """Return the name that clients use: the setting, else the model's name, for a folder its last part."""
    if settings.served_name:
        return settings.served_name
    return settings.model.rstrip("/").rsplit("/", 1)[-1] if settings.model.startswith(("/", ".")) else settings.model
