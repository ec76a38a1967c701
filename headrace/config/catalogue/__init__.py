"""Every setting of Headrace, as data.

One record gives a setting its flag, its environment variable, its TOML key, its type and limits, its default and its help
text, so that these cannot drift apart.  `headrace/config/settings.py` reads values by this table, `headrace/cli` makes flags of
it, `headrace config` prints it and `docs/operations.md` is checked against it.

Nothing heavy is imported here: `headrace --help` reads this package.
"""

from __future__ import annotations

from headrace.config.catalogue.deployment import SERVER, UP
from headrace.config.catalogue.frontend import FRONTEND
from headrace.config.catalogue.general import GENERAL, NATS
from headrace.config.catalogue.prefill import ROUTER_PREFILL, WORKER_PREFILL
from headrace.config.catalogue.router import ROUTER
from headrace.config.catalogue.setting import Command, Kind, Setting
from headrace.config.catalogue.worker import WORKER

__all__ = ["BY_ENV", "BY_KEY", "OTHER_ENV", "SETTINGS", "Command", "Kind", "Setting", "settings_of"]

SETTINGS: tuple[Setting, ...] = (
    *GENERAL,
    *NATS,
    *SERVER,
    *UP,
    *FRONTEND,
    *WORKER,
    *WORKER_PREFILL,
    *ROUTER,
    *ROUTER_PREFILL,
)
BY_KEY = {setting.key: setting for setting in SETTINGS}
BY_ENV = {setting.env: setting for setting in SETTINGS}

# Variables that are no settings but belong to Headrace.
OTHER_ENV = {
    "HEADRACE_CONFIG": "the TOML file to read",
    "HEADRACE_SUPERVISOR_PID": "set by `headrace up` for its parts: they end when that process does",
}


def settings_of(command: Command) -> list[Setting]:
    """The settings a command uses."""
    return [setting for setting in SETTINGS if command in setting.commands]
