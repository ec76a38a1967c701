"""Encrypts what lies in a store that workers of all pools read, under a key that only its message has.

Authenticated encryption (XSalsa20-Poly1305, of libsodium), a random key for each object.  Who reads the store without the
message, a worker of another pool, sees the size; who changes it is noticed.
"""

from __future__ import annotations

import asyncio

from headrace.broker.errors import BrokerError
from headrace.broker.messages import Spill

_INLINE_BYTES = 1 << 18  # encrypting these takes about two milliseconds


async def seal(data: bytes) -> tuple[bytes, bytes]:
    """Return a new key, and the data encrypted under it."""
    import nacl.secret
    import nacl.utils

    key = nacl.utils.random(nacl.secret.SecretBox.KEY_SIZE)
    box = nacl.secret.SecretBox(key)
    if len(data) <= _INLINE_BYTES:
        return key, bytes(box.encrypt(data))
    return key, bytes(await asyncio.to_thread(box.encrypt, data))


async def unseal(spill: Spill, data: bytes) -> bytes:
    """Return the content of an object, which is encrypted if its message has a key. Raises BrokerError if it was changed."""
    if not spill.key:
        return data
    import nacl.exceptions
    import nacl.secret

    try:
        box = nacl.secret.SecretBox(spill.key)
        if len(data) <= _INLINE_BYTES:
            return box.decrypt(data)
        return await asyncio.to_thread(box.decrypt, data)
    except (nacl.exceptions.CryptoError, ValueError) as error:  # a ValueError: it is too short to be one
        raise BrokerError(f"the object {spill.object} is damaged: {error}") from error
