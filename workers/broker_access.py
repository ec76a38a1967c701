"""Describes to an engine's own processes how they reach the broker, for parts of an engine that keep something there."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import msgspec

from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.subjects import Subjects


@dataclass(frozen=True, slots=True)
class BrokerAccess:
    """A login, the names of a deployment, and the pool of the worker."""

    options: ConnectOptions
    subjects: Subjects
    pool: str

    def write(self, path: Path) -> None:
        """Write a new file that only this user can read: an option or a variable would be seen by others of the machine."""
        data = msgspec.json.encode({"options": asdict(self.options), "prefix": self.subjects.prefix, "pool": self.pool})
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as file:
            file.write(data)

    @classmethod
    def read(cls, path: Path) -> BrokerAccess:
        """Read what `write` has written."""
        given = msgspec.json.decode(path.read_bytes())
        options: dict[str, Any] = {
            name: tuple(value) if isinstance(value, list) else value for name, value in given["options"].items()
        }
        return cls(ConnectOptions(**options), Subjects(given["prefix"]), given["pool"])
