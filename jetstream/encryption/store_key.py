"""Keeps the key of an encrypted store of nats-server: makes it once, and lets no server begin with another one or without it.

nats-server starts with any key: it leaves out what it cannot decrypt, and streams that are created under these names begin
empty.  So before each start the key is compared with what is stored, and with the note of the last start.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path

import structlog

from headrace.jetstream.encryption.key_files import META, META_KEY, Wrapping, opens, wrap_again
from headrace.jetstream.errors import ConnectError

log = structlog.get_logger(__name__)

KEY = "store.key"  # in the data folder
NOTE = "store.key.id"  # tells later starts which key it was, and nothing of it
MOVED = "headrace-moved"  # in the folder of a stream: the accounts that it had before
STREAMS = "jetstream/*/streams/*"  # in the store
_TEXT = re.compile(r"[A-Za-z0-9+/=_.-]{32,512}")
_ENCRYPT = "--nats-encrypt aes"


class StoreKeyUnusable(ConnectError):
    """The key of the NATS server's store is missing, is another one, or cannot be read or written."""


def note_move(stream: Path, account: str) -> None:
    """Note in the folder of a stream that is about to be moved from which account its keys are. Raises OSError."""
    if not (stream / META_KEY).exists():
        return
    note = stream / MOVED
    before = note.read_text().split() if note.exists() else []
    note.write_text("\n".join(dict.fromkeys((*before, account))) + "\n")


def plain_streams(store: Path) -> list[str]:
    """Return which streams of a store are not encrypted, by account and name."""
    return [_name(stream) for stream in _streams(store) if (stream / META).exists() and not (stream / META_KEY).exists()]


class StoreKey:
    """The key of one store: that in its file, and that of earlier starts, whose note lies beside the store."""

    def __init__(self, data_dir: Path, *, file: str | None = None, old_file: str | None = None) -> None:
        """`old_file`: what is stored under the key in it comes under that in `file`."""
        self.store = data_dir / "store"
        self.file = Path(file).expanduser().absolute() if file else data_dir / KEY
        self._old_file = Path(old_file).expanduser().absolute() if old_file else None
        self._note = data_dir / NOTE

    def refuse_encrypted(self) -> None:
        """Raise StoreKeyUnusable if the store is encrypted: a server without the key would leave all of it out."""
        if encrypted := self._encrypted():
            raise StoreKeyUnusable(
                f"{self.store} is encrypted ({len(encrypted)} streams) and cannot be used without its key: start with "
                f"{_ENCRYPT}; no server writes it back in plain text"
            )

    def open(self) -> str:
        """Return the key, which is made where nothing is stored under one, once all that is stored is under it.

        Raises StoreKeyUnusable, and changes nothing then.
        """
        encrypted = self._encrypted()
        key = self._read(self.file)
        if key is None:
            if encrypted:
                raise StoreKeyUnusable(
                    f"the key of the NATS server's store, {self.file}, is gone, and {self.store} is encrypted under it "
                    f"({len(encrypted)} streams): put it back, or say with --nats-store-key where it is. Without the key what "
                    f"is stored is lost; to begin without it, move {self.store} away"
                )
            key = self._make()
        if encrypted:
            self._check(key, encrypted)
        self._write_note(key)
        return key

    def _check(self, key: str, encrypted: list[Path]) -> None:
        """Have all streams under the key, those of another account and of the old key too. Raises StoreKeyUnusable."""
        keys = [key, *self._old()]
        noted = self._noted()
        if len(noted) > 1 and not noted <= {_id(each) for each in keys}:
            raise StoreKeyUnusable(
                f"a change of the key of {self.store} was cut short: start with both keys, --nats-store-key and "
                "--nats-old-store-key"
            )
        wrappings = {stream: self._wrappings(stream, keys) for stream in encrypted}
        closed = [stream for stream in encrypted if not any(opens(stream, each) for each in wrappings[stream])]
        if closed and noted != {_id(key)}:  # else it is the key of the last start: they are damaged, as nats-server will say
            raise StoreKeyUnusable(
                f"the key in {self.file} is not that of {self.store}: it opens {len(encrypted) - len(closed)} of its "
                f"{len(encrypted)} streams, and not {_name(closed[0])}. Put the right one there, or say with --nats-store-key "
                "where it is; one that was replaced is given with --nats-old-store-key"
            )
        if len(keys) > 1:
            self._write_note(*keys)
        try:
            for stream in encrypted:
                self._adopt(stream, wrappings[stream])
        except OSError as error:
            raise StoreKeyUnusable(f"the keys in {self.store} cannot be written anew: {error.strerror}") from None
        if len(keys) > 1:
            log.info("server.store_key_replaced", streams=len(encrypted), data_dir=str(self.store.parent))

    def _old(self) -> list[str]:
        if self._old_file is None:
            return []
        old = self._read(self._old_file)
        if old is None:
            raise StoreKeyUnusable(f"there is no key in {self._old_file}, which --nats-old-store-key names")
        return [old]

    def _adopt(self, stream: Path, wrappings: list[Wrapping]) -> None:
        note = stream / MOVED
        if len(wrappings) == 1:
            return
        if unopened := wrap_again(stream, wrappings[0], wrappings[1:]):
            log.error("server.keys_unreadable", stream=_name(stream), files=unopened)
        note.unlink(missing_ok=True)

    def _wrappings(self, stream: Path, keys: list[str]) -> list[Wrapping]:
        """Return what the keys of a stream may be encrypted under; first what they are to be under."""
        account = stream.parents[1].name
        try:
            before = (stream / MOVED).read_text().split()
        except (OSError, ValueError):
            before = []
        return [Wrapping(key, each) for key in keys for each in dict.fromkeys((account, *before))]

    def _encrypted(self) -> list[Path]:
        return [stream for stream in _streams(self.store) if (stream / META_KEY).exists()]

    def _read(self, path: Path) -> str | None:
        try:
            text = path.read_text().strip()
            mode = path.stat().st_mode
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            raise StoreKeyUnusable(f"the key {path} cannot be read: {getattr(error, 'strerror', error)}") from None
        if not _TEXT.fullmatch(text):
            raise StoreKeyUnusable(
                f"the key {path} is unusable: it is 32 to 512 letters, digits or any of + / = _ . - on one line, as "
                "`openssl rand -hex 32` prints"
            )
        if mode & 0o077:
            log.warning("server.store_key_open", file=str(path), mode=f"{mode & 0o777:04o}", meaning="others may read it")
        return text

    def _make(self) -> str:
        """Make a key, which is on the disk before anything is encrypted under it."""
        key = secrets.token_hex(32)
        try:
            _write(self.file, key)
        except OSError as error:
            raise StoreKeyUnusable(f"the key {self.file} cannot be written: {error.strerror}") from None
        log.info("server.store_key_made", file=str(self.file), meaning="what is stored is lost without it")
        return key

    def _noted(self) -> set[str]:
        try:
            return set(self._note.read_text().split())
        except (OSError, ValueError):
            return set()

    def _write_note(self, *keys: str) -> None:
        """Note which key what is stored is under; two while one is replaced."""
        ids = {_id(key) for key in keys}
        if self._noted() == ids:
            return
        try:
            _write(self._note, "\n".join(sorted(ids)))
        except OSError as error:
            raise StoreKeyUnusable(f"{self._note} cannot be written: {error.strerror}") from None


def _streams(store: Path) -> Iterator[Path]:
    """Yield the folders of streams; one whose name begins with a dot is being deleted."""
    return (path for path in sorted(store.glob(STREAMS)) if path.is_dir() and not path.name.startswith("."))


def _name(stream: Path) -> str:
    return f"{stream.parents[1].name}/{stream.name}"


def _id(key: str) -> str:
    return hmac.digest(key.encode(), b"headrace: which key is it", hashlib.sha256).hex()


def _write(path: Path, text: str) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    fresh = path.with_name(path.name + ".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(text + "\n")
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
