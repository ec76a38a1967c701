"""Packs an adapter's two files into a tar archive, and unpacks them, and nothing else, from one."""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO

from headrace.workers.adapter_files.safe_files import FILES
from headrace.workers.errors import AdapterFilesError

PIECE = 1024 * 1024  # bytes


def pack(folder: Path, out: IO[bytes]) -> None:
    """Write the archive. The same files give the same bytes, so that pushing them again changes no digest."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in FILES:
            path = folder / name
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            entry.mode = 0o600
            with path.open("rb") as file:
                archive.addfile(entry, file)


def unpack(archive: Path, folder: Path, *, most_bytes: int) -> None:
    """Unpack the adapter's files, which may lie in one folder of the archive. Raises AdapterFilesError.

    Read one entry at a time and counted, because a small archive may hold very much.
    """
    found: set[str] = set()
    left = most_bytes
    try:
        with tarfile.open(archive, mode="r:*") as entries:
            for entry in entries:
                if entry.size > left:  # also of what is left out below: it has to be read all the same
                    raise AdapterFilesError(f"the archive holds more than {most_bytes} bytes (worker.adapter_max_bytes)")
                left -= entry.size
                name = entry.name.rpartition("/")[2]
                if name not in FILES:
                    continue
                if not entry.isreg() or name in found:
                    raise AdapterFilesError(f"the archive has {entry.name!r} twice, or not as a plain file")
                file = entries.extractfile(entry)
                assert file is not None  # noqa: S101  # of a regular file
                with (folder / name).open("wb") as out:
                    for piece in _pieces(file):
                        out.write(piece)
                found.add(name)
                if len(found) == len(FILES):
                    return
    except (tarfile.TarError, EOFError, OSError) as error:
        raise AdapterFilesError(f"the archive cannot be read: {error}") from None
    missing = ", ".join(name for name in FILES if name not in found)
    raise AdapterFilesError(f"the archive has no {missing}")


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece
