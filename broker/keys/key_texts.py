"""Makes the texts of API keys, and the hashes by which they are known.

A key is `hr_sk_<public id>_<secret>`: the id of 8 characters may be shown and logged, the secret has 256 random bits. So a
plain SHA-256 is enough to keep it from any reader of the store.
"""

from __future__ import annotations

import hashlib
import re
import secrets

ID_LENGTH = 8
_ALPHABET = "abcdefghijkmnpqrstuvwxyz23456789"  # without letters that look like digits
_KEY = re.compile(r"hr_sk_(?P<id>[a-z0-9]{8})_[A-Za-z0-9_-]{43}\Z")


def new_key_id() -> str:
    """Return a new public id."""
    return "".join(secrets.choice(_ALPHABET) for _ in range(ID_LENGTH))


def new_key_text(key_id: str) -> str:
    """Return a new key with this public id."""
    return f"hr_sk_{key_id}_{secrets.token_urlsafe(32)}"


def digest_of(text: bytes) -> bytes:
    """Return the hash under which a key is stored and looked up."""
    return hashlib.sha256(text).digest()


def public_id(text: str) -> str | None:
    """Return the public id in a key of Headrace's own form, for the log; None for any other text."""
    match = _KEY.match(text)
    return match["id"] if match else None
