"""Takes the stored streams of a data folder along when its NATS server begins or ceases to ask for logins of roles.

nats-server keeps the streams of each account in a folder with the account's name: `$G` without logins and with the one of the
deployment, else that of `streams_account`.  While no server runs, another account has them once their folders lie there.  Only
one account has streams at a time: the server is not healthy while there is the folder of an account that it does not know.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path

import structlog

from headrace.base.errors import EXIT_CONFIGURATION, StartFailed
from headrace.jetstream.embedded_server import CONFIG, KEY_ID
from headrace.jetstream.logins.roles import streams_account

_log = structlog.get_logger()

WITHOUT_LOGINS = "$G"
_STREAMS = "streams"
_OLD_SERVER_S = 15.0  # longer than it takes to stop
_AGAIN_S = 0.05


class StreamsNotMoved(StartFailed):
    """Stored streams cannot be taken along, and would be out of sight."""

    exit_code = EXIT_CONFIGURATION


class StoredStreams:
    """The streams in the data folder of a deployment's own server."""

    def __init__(self, folder: Path, prefix: str) -> None:
        """`folder` is that of the embedded server, `prefix` that of the deployment that is started."""
        self._folder = folder
        self._accounts = folder / "store" / "jetstream"
        self._with_logins = streams_account(prefix)

    def bring(self, *, logins: bool) -> None:
        """Move what is stored where the server that is to be started does not see it. Raises StreamsNotMoved.

        Streams that two accounts have are never put together: those of the last start are used, if it was of the same kind.
        """
        wanted = self._with_logins if logins else WITHOUT_LOGINS
        target = self._accounts / wanted / _STREAMS
        for other in self._others(wanted):
            source = self._accounts / other / _STREAMS
            found = self._streams(source)
            if twice := sorted(found & self._streams(target)):
                self._leave(twice, other, wanted)
                continue
            if (self._folder / KEY_ID).exists():  # nats-server derives the keys of streams from their account
                raise StreamsNotMoved(
                    f"the streams in {source} are encrypted for their account and cannot be moved to {target}: start "
                    f"{_flag(not logins)}, or, to begin with an empty store, move {self._folder / 'store'} away"
                )
            self._wait_for_old_server()
            try:
                self._move(source, target, found)
            except OSError as error:
                raise StreamsNotMoved(
                    f"stored streams cannot be moved from {source} to {target} ({error.strerror}): make both writable, or "
                    f"start {_flag(not logins)} to go on as before"
                ) from None
            _log.info("nats.streams_moved", logins=logins, streams=len(found), account=wanted, before=other)

    def _others(self, wanted: str) -> list[str]:
        try:
            return sorted(path.name for path in self._accounts.iterdir() if path.is_dir() and path.name != wanted)
        except FileNotFoundError:
            return []
        except OSError as error:
            raise StreamsNotMoved(f"stored streams in {self._accounts} cannot be read: {error.strerror}") from None

    def _streams(self, folder: Path) -> set[str]:
        try:
            return {path.name for path in folder.iterdir() if path.is_dir()}
        except (FileNotFoundError, NotADirectoryError):
            return set()
        except OSError as error:
            raise StreamsNotMoved(f"stored streams in {folder} cannot be read: {error.strerror}") from None

    def _move(self, source: Path, target: Path, streams: set[str]) -> None:
        target.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name in sorted(streams):
            (source / name).rename(target / name)
        for folder in (source, source.parent):  # of an account that the server does not know
            with contextlib.suppress(FileNotFoundError):
                folder.rmdir()

    def _leave(self, twice: list[str], other: str, wanted: str) -> None:
        """Leave streams where they are: there are two sets. Raises StreamsNotMoved unless the wanted one was used last."""
        unused = self._accounts / other
        if other == WITHOUT_LOGINS and self._last_account() == wanted:
            _log.warning("nats.streams_unseen", folder=str(unused), streams=len(twice), meaning="of an earlier start; not used")
            return
        raise StreamsNotMoved(
            f"streams ({len(twice)}, {twice[0]} among them) are stored twice: in {unused}, and in {self._accounts / wanted}, "
            f"which this start would use. {self._last_account() or 'Neither'} was used last. Move the folder that you do not "
            f"want out of {self._accounts}, or start {_flag(wanted == WITHOUT_LOGINS)}"
        )

    def _last_account(self) -> str | None:
        """Return the account with the streams of the last server that was started, None if there was none."""
        try:
            lines = (self._folder / CONFIG).read_text().splitlines()
        except OSError:
            return None
        return self._with_logins if f"  {self._with_logins}: {{" in lines else WITHOUT_LOGINS

    def _wait_for_old_server(self) -> None:
        """Wait until no server of a killed `up` has the streams open. Raises StreamsNotMoved."""
        deadline = time.monotonic() + _OLD_SERVER_S
        while running := list(self._servers()):
            if time.monotonic() > deadline:
                raise StreamsNotMoved(
                    f"a nats-server with the process id {running[0]} still uses {self._folder}: stop it first"
                )
            time.sleep(_AGAIN_S)

    def _servers(self) -> Iterator[int]:
        for path in (self._folder / "run").glob("nats-server_*.ports"):
            number = path.stem.rpartition("_")[2]
            if number.isdecimal() and _uses(int(number), self._folder):
                yield int(number)


def _uses(pid: int, folder: Path) -> bool:
    """Return whether a process is the server with this data folder, as far as the system tells."""
    try:
        os.kill(pid, 0)
        command = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (OSError, OverflowError):
        return False
    return os.fsencode(folder / CONFIG) in command


def _flag(logins: bool) -> str:
    return f"with --nats-login {'roles' if logins else 'one'}"
