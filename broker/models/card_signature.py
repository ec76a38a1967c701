"""Signs model cards with a key of the deployment, and checks the signatures of those that are read.

The signature is an HMAC-SHA-256 of the whole card but for its adapters, which come and go and are named by leases, too.  The
card has the SHA-256 of each of its files, so that tokenizer and template are signed with it.
"""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path

import msgspec

from headrace.broker.codec import encode
from headrace.broker.errors import CardForged, CardKeyUnusable
from headrace.broker.models.cards import ModelCard

LEAST_KEY_BYTES = 32


def read_card_key(path: str | None) -> bytes:
    """Return the key in this file, empty without one. Raises CardKeyUnusable."""
    if path is None:
        return b""
    try:
        key = Path(path).expanduser().read_bytes().strip()
    except OSError as error:
        raise CardKeyUnusable(f"the key of model cards {path} cannot be read: {error.strerror}") from None
    if len(key) < LEAST_KEY_BYTES:
        raise CardKeyUnusable(f"the key of model cards {path} has {len(key)} bytes, at least {LEAST_KEY_BYTES} are needed")
    return key


def signed(card: ModelCard, key: bytes) -> ModelCard:
    """Return the card with its signature, as it is without a key."""
    return msgspec.structs.replace(card, signature=_signature(card, key)) if key else card


def check_signature(card: ModelCard, key: bytes) -> None:
    """Raise CardForged unless the card was signed with this key. Without a key every card is taken."""
    if key and not hmac.compare_digest(card.signature, _signature(card, key)):
        how = "with another key" if card.signature else "not at all"
        raise CardForged(f"the card of {card.model[:80]!r} in pool {card.pool} was signed {how}, or changed since")


def _signature(card: ModelCard, key: bytes) -> bytes:
    bare = msgspec.structs.replace(card, adapters=[], signature=b"")
    return hmac.new(key, encode(bare), hashlib.sha256).digest()
