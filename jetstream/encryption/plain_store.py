"""Encrypts a store of nats-server that was made without encryption: a copy of it, which takes its place once it is whole.

nats-server encrypts what it finds in plain text at its start, in place: a block whose encryption was cut short would be lost.
So a server of its own does it with a copy, without the index of each stream, for want of which it reads all blocks.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import structlog

from headrace.jetstream.encryption.store_key import STREAMS, StoreKeyUnusable, plain_streams

log = structlog.get_logger(__name__)

COPY = "encrypting"  # in the data folder: that of the server which encrypts
PLAIN = "store.plain"  # beside the store, until it is removed
_INDEX = "index.db"
_ROOM = 1.2  # times the size of the store


def settle(data_dir: Path) -> None:
    """Finish an exchange of the stores that was cut short, or undo what was not whole. Raises OSError."""
    store, copy, plain = data_dir / "store", data_dir / COPY, data_dir / PLAIN
    if plain.exists():
        if not store.exists():
            (copy / "store" if (copy / "store").exists() else plain).rename(store)
        shutil.rmtree(plain, ignore_errors=True)
    if copy.exists():
        shutil.rmtree(copy)


def encrypt_store(data_dir: Path, streams: list[str], run: Callable[[Path, float], None]) -> None:
    """Put an encrypted copy in the place of a store with `streams` in plain text.

    `run` starts a server with a data folder, within some seconds, and stops it. Until the copy is whole the store stays as it
    is. Raises StoreKeyUnusable, ConnectError, OSError.
    """
    store, copy, plain = data_dir / "store", data_dir / COPY, data_dir / PLAIN
    size = sum(file.stat().st_size for file in store.rglob("*") if file.is_file())
    if shutil.disk_usage(data_dir).free < size * _ROOM:
        raise StoreKeyUnusable(
            f"{store} is in plain text, and its disk has no room for an encrypted copy ({size >> 20} MiB): make room, or start "
            "with --nats-encrypt none"
        )
    log.info("server.store_encrypting", streams=len(streams), mib=size >> 20, data_dir=str(data_dir))
    shutil.copytree(store, copy / "store", ignore=shutil.ignore_patterns(_INDEX))
    run(copy, 30 + size / 5e6)
    if left := [file for file in copy.glob(f"store/{STREAMS}/msgs/*.blk") if _is_plain(file)]:
        raise StoreKeyUnusable(
            f"{store} is in plain text and was not encrypted, {left[0].parts[-3]} for one: it is as it was; start with "
            "--nats-encrypt none, or move that stream away"
        )
    if unread := plain_streams(copy / "store"):
        log.error(
            "server.streams_not_encrypted", streams=unread, meaning="the server could not read them", data_dir=str(data_dir)
        )
    os.sync()  # the server writes what it encrypts without waiting for the disk
    store.rename(plain)
    (copy / "store").rename(store)
    shutil.rmtree(plain)
    shutil.rmtree(copy)
    log.info("server.store_encrypted", streams=len(streams), data_dir=str(data_dir))


def _is_plain(block: Path) -> bool:
    """Return whether a block of a stream that is encrypted is not; a stream that the server could not read stays as it was."""
    meta = block.parents[1] / "meta.key"
    return meta.exists() and block.stat().st_size > 0 and not block.with_suffix(".key").exists()
