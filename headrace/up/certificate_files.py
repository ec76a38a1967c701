"""Notices that the certificates of the embedded NATS server were renewed."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path


class CertificateFiles:
    """Files whose changes are looked for. One that is missing for a moment, while it is replaced, has not changed."""

    def __init__(self, paths: Iterable[str | None]) -> None:
        self._paths = [Path(path).expanduser() for path in paths if path is not None]
        self._seen = {path: _stamp(path) for path in self._paths}

    def changed(self) -> bool:
        """Return True if one of the files is another one than at the last call."""
        found = {path: stamp for path in self._paths if (stamp := _stamp(path)) is not None}
        changed = any(self._seen[path] != stamp for path, stamp in found.items())
        self._seen |= found
        return changed


def _stamp(path: Path) -> tuple[int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
