"""Reads and writes the key files of an encrypted store of nats-server: the keys of its streams, blocks and consumers.

nats-server encrypts every block of messages, and what describes a stream or consumer, under a random key of its own. That key
lies beside it in a `.key` file, encrypted under one that follows from the store's key, the account and the name of what it
opens.  So a stream in the folder of another account, or under another key of the store, can be read once its key files are
written anew; the messages stay as they are.

The format is that of `genEncryptionKeys` in nats-server's filestore.go with AES: 16 bytes nonce, then the key encrypted by
AES-256-GCM with its tag. The nonce is that of the block's messages too, hence it stays.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

META_KEY = "meta.key"  # of a stream, in its folder; of a consumer, in its own
META = "meta.inf"
NONCE_BYTES = 16
KEY_FILE_BYTES = NONCE_BYTES + 32 + 16


class Wrapping(NamedTuple):
    """The key of the store and the account, from which follows the key that a stream's keys are encrypted under."""

    key: str
    account: str


def opens(stream: Path, wrapping: Wrapping) -> bool:
    """Return whether the key of a stream is encrypted under this, as far as its file can be read."""
    try:
        return _unwrapped((stream / META_KEY).read_bytes(), wrapping, stream.name) is not None
    except OSError:
        return False


def wrap_again(stream: Path, new: Wrapping, old: Sequence[Wrapping]) -> int:
    """Encrypt the keys of a stream under `new`, and return how many could not be opened. Raises OSError.

    Those that are so already stay, hence what was cut short is finished by another call. That of the stream itself comes last.
    """
    unopened = 0
    for path, context in (*_inner_keys(stream), (stream / META_KEY, stream.name)):
        found = path.read_bytes()
        if _unwrapped(found, new, context) is not None:
            continue
        secret = next((secret for each in old if (secret := _unwrapped(found, each, context)) is not None), None)
        if secret is None:
            unopened += 1  # damaged: nats-server says so itself
            continue
        _replace(path, _wrapped(secret, found[:NONCE_BYTES], new, context))
    return unopened


def _inner_keys(stream: Path) -> Iterator[tuple[Path, str]]:
    for path in sorted((stream / "msgs").glob("*.key")):
        yield path, f"{stream.name}:{path.stem}"
    for path in sorted((stream / "obs").glob(f"*/{META_KEY}")):
        yield path, f"{stream.name}.{path.parent.name}"


def _above(wrapping: Wrapping, context: str) -> bytes:
    return hmac.digest(wrapping.key.encode(), (wrapping.account + context).encode(), hashlib.sha256)


def _unwrapped(found: bytes, wrapping: Wrapping, context: str) -> bytes | None:
    from cryptography.exceptions import InvalidTag
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    if len(found) != KEY_FILE_BYTES:
        return None
    try:
        return AESGCM(_above(wrapping, context)).decrypt(found[:NONCE_BYTES], found[NONCE_BYTES:], None)
    except InvalidTag:
        return None


def _wrapped(secret: bytes, nonce: bytes, wrapping: Wrapping, context: str) -> bytes:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    return nonce + AESGCM(_above(wrapping, context)).encrypt(nonce, secret, None)


def _replace(path: Path, content: bytes) -> None:
    fresh = path.with_name(path.name + ".new")
    with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    fresh.replace(path)
