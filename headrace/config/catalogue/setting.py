"""What a setting is."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

Kind = Literal["text", "integer", "seconds", "number", "switch", "choice", "list", "path", "table"]
Command = Literal["up", "frontend", "worker", "router", "streams", "control", "model"]

ALL: tuple[Command, ...] = ("up", "frontend", "worker", "router", "streams", "control")
LOGGING: tuple[Command, ...] = (*ALL, "model")


class Setting(NamedTuple):
    """One setting. `key` is the TOML key; the environment variable follows from it."""

    key: str
    kind: Kind
    default: Any
    help: str
    commands: tuple[Command, ...]
    flag: str = ""
    choices: tuple[str, ...] = ()
    least: float | None = None
    most: float | None = None
    secret: bool = False
    metavar: str = ""

    @property
    def env(self) -> str:
        return "HEADRACE_" + self.key.replace(".", "_").upper()

    @property
    def dest(self) -> str:
        """The attribute of the parsed arguments."""
        return self.key.replace(".", "__")


PORT: dict[str, Any] = {"least": 0, "most": 65535, "metavar": "PORT"}
