"""Defines every exception that can leave `headrace/`, and the exit code of each.

HeadraceError
└── CommandError                   the command line ends with `exit_code` and the message
    ├── SettingsError              a setting is wrong: names the key, its value and where it came from
    ├── AlreadyRunning             another `headrace up` uses this data folder
    ├── PartFailed                 a process that `up` needs refused to start
    └── StartFailed                something the command needs is missing or broken
"""

from __future__ import annotations

EXIT_OK = 0
EXIT_FAILURE = 1
EXIT_USAGE = 2  # the command line is wrong
EXIT_UNAVAILABLE = 69  # the NATS server cannot be reached: trying again later may help
EXIT_ENGINE_DIED = 70
EXIT_CONFIGURATION = 78  # wrong settings: trying again without a change is pointless


class HeadraceError(Exception):
    """Root of all exceptions that Headrace raises on purpose."""

    retriable: bool = False

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (self.__doc__ or type(self).__name__).strip().splitlines()[0])


class CommandError(HeadraceError):
    """The command cannot go on."""

    exit_code: int = EXIT_FAILURE


class SettingsError(CommandError):
    """A setting is wrong."""

    exit_code = EXIT_CONFIGURATION


class AlreadyRunning(CommandError):
    """Another `headrace up` uses this data folder."""

    exit_code = EXIT_CONFIGURATION


class StartFailed(CommandError):
    """Something the command needs is missing or broken."""


class PartFailed(CommandError):
    """A process that `headrace up` needs refused to start."""

    def __init__(self, message: str, *, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(message)
        self.exit_code = exit_code
