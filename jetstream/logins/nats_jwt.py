"""Signs the JSON web tokens with which nats-server knows operators, accounts and users, where it runs in operator mode.

The form is that of version 2 of NATS' own libraries: EdDSA over an NKey, claims of the kind under `nats`.
"""

from __future__ import annotations

import base64
import hashlib
import json
import secrets
import time
from collections.abc import Mapping
from typing import Any

import nkeys

from headrace.jetstream.logins.permissions import Permissions

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
NO_LIMIT = -1


class SigningKey:
    """An NKey of an operator, an account or a user that signs."""

    def __init__(self, seed: str) -> None:
        self.seed = seed
        self._pair = nkeys.from_seed(bytearray(seed.encode()))
        self.public = str(self._pair.public_key.decode())

    @classmethod
    def new(cls, kind: str) -> SigningKey:
        """Make one for an `operator`, an `account` or a `user`."""
        return cls(str(nkeys.encode_seed(secrets.token_bytes(32), _PREFIXES[kind]).decode()))

    def sign(self, subject: str, name: str, claims: Mapping[str, Any], *, life_s: float = 0.0, audience: str = "") -> str:
        """Return a token about `subject`, a public key. `life_s` 0: it does not expire."""
        now = int(time.time())
        body: dict[str, Any] = {"jti": "", "iat": now, "iss": self.public, "name": name, "sub": subject}
        body["nats"] = {**claims, "version": 2}
        if audience:
            body["aud"] = audience
        if life_s:
            body["exp"] = now + int(life_s)
        digest = hashlib.sha256(_json(body)).digest()
        body["jti"] = base64.b32encode(digest).decode().rstrip("=")
        signed = f"{_text(_json(_HEADER))}.{_text(_json(body))}"
        return f"{signed}.{_text(self._pair.sign(signed.encode()))}"


def user_claims(allowed: Permissions, account: str = "") -> dict[str, Any]:
    """Return the claims of a user with these permissions. `account` where a key of an account signs that is not its own."""
    claims: dict[str, Any] = {
        "type": "user",
        "pub": {"allow": list(allowed.publish)},
        "sub": {"allow": list(allowed.subscribe)},
        "subs": NO_LIMIT,
        "data": NO_LIMIT,
        "payload": NO_LIMIT,
    }
    return {**claims, "issuer_account": account} if account else claims


def _json(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


_PREFIXES = {
    "operator": nkeys.PREFIX_BYTE_OPERATOR,
    "account": nkeys.PREFIX_BYTE_ACCOUNT,
    "user": nkeys.PREFIX_BYTE_USER,
}
