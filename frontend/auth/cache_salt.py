"""Makes the salt that keeps the prefix caches of tenants apart."""

from __future__ import annotations

import hashlib
from functools import lru_cache


@lru_cache(maxsize=4096)
def tenants_salt(tenant: str, asked: str | None) -> str:
    """Return 128 bits of a hash of the tenant and the salt that the client asked for, as hexadecimal digits.

    Blocks of prompts are found by hashes that begin with the salt, so a tenant finds only its own, whatever salt another names.
    """
    return hashlib.sha256(f"{tenant}\0{asked or ''}".encode()).hexdigest()[:32]
