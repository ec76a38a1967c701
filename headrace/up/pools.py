"""Lists the pools of one `headrace up`, each with settings of its own."""

from __future__ import annotations

from collections.abc import Iterator

from headrace.config.pools import POOLS
from headrace.config.settings import Settings
from headrace.errors import SettingsError


def every_pool(settings: Settings) -> Iterator[tuple[str, Settings]]:
    """Yield the name and the settings of each pool that `headrace up` runs. The name of the first one is empty.

    Raises SettingsError for a pool that makes no sense, and for two of one name.
    """
    yield "", settings
    for name in settings[POOLS]:
        if name == settings["worker.served_name"]:
            raise SettingsError(
                f"{POOLS}.{name} ({settings.source(POOLS)}): the first pool has that name; a pool is one engine"
            )
        yield name, settings.of_pool(name)
