"""Lists the pools of one `headrace up`, each with settings of its own."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.base.errors import SettingsError
from headrace.config.pools import POOLS
from headrace.config.settings import Settings


def every_pool(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield the name and the settings of each pool that `headrace up` runs. The name of the first one is empty.

    Raises SettingsError for a pool that makes no sense, and for two of one name.
    """
    yield "", settings
    for name in settings[POOLS]:
        pool = settings.of_pool(name)
        if pool["worker.served_name"] == settings["worker.served_name"]:
            _check_fleets(name, settings, pool)
        yield name, pool


def _check_fleets(name: str, first: Settings, other: Settings) -> None:
    """Raise SettingsError for a pool of the first one's model that is no fleet beside it."""
    where = f"{POOLS}.{name} ({first.source(POOLS)})"
    if not other["worker.fleet"]:
        raise SettingsError(f"{where}: the first pool has that name; a pool is one engine, unless both are fleets (fleet)")
    if first["worker.fleet"] in ("", other["worker.fleet"]):
        raise SettingsError(f"{where}: the first pool serves that model, too: give it a fleet of its own (--fleet)")
