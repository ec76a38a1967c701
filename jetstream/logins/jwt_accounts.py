"""Writes the accounts of a deployment as JSON web tokens, for a nats-server in operator mode, and a credentials file per login.

The accounts are those of `headrace.jetstream.logins.nkey_logins`: one with the streams and without users, one of the parts,
into which what parts may do with streams is imported.  Exports are private: the import has an activation that the exporting
account has signed.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import nkeys

from headrace.jetstream.errors import ConnectError
from headrace.jetstream.logins.nkey_logins import API_EXPORT, SEED, LoginFileUnusable, exported_subjects, user_key
from headrace.jetstream.logins.roles import PARTS_API, Login, Permissions, permissions, streams_account
from headrace.jetstream.topology import Topology

_HEADER = {"typ": "JWT", "alg": "ed25519-nkey"}
NO_LIMIT = -1


class SigningKey:
    """An NKey of an operator, an account or a user that signs JSON web tokens.

    The form is version 2 of NATS' own libraries: EdDSA over an NKey, claims of the kind under `nats`.
    """

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
    """Return the claims of a user with these permissions. `account`: the account, if a signing key of it signs instead."""
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


CREDENTIALS = ".creds"
SIGNING = "signing"  # the folder of the keys that sign; parts need none of them
_SIGNERS = {"operator": "operator", "system": "account", "streams": "account", "parts": "account"}

CONTROL_LINE = 65_536  # bytes; a client sends its token in one line, and that of an ingress has more than the server's 4 KiB

_LIMITS = {
    **dict.fromkeys(("subs", "data", "payload", "imports", "exports", "conn", "leaf"), NO_LIMIT),
    "wildcards": True,
}
_JETSTREAM = dict.fromkeys(("mem_storage", "disk_storage", "streams", "consumer"), NO_LIMIT)


def operator_config(topology: Topology, folder: Path, logins: Iterable[Login]) -> str:
    """Return the configuration of a server, after writing a credentials file for each login.

    Makes the signing keys and seeds that are missing. Raises LoginFileUnusable.
    """
    keys = {name: _signing_key(folder / SIGNING, name, kind) for name, kind in _SIGNERS.items()}
    operator, streams, parts = keys["operator"], keys["streams"], keys["parts"]
    for login in sorted(logins):
        claims = user_claims(permissions(topology, login))
        token = parts.sign(user_key(folder, login.name), login.name, claims)
        seed = (folder / (login.name + SEED)).read_text().strip()
        _write(folder / (login.name + CREDENTIALS), _credentials(token, seed))
    subjects = exported_subjects(topology)
    prefix = streams_account(topology.subjects.prefix)
    accounts = {
        keys["system"].public: operator.sign(keys["system"].public, "SYS", account_claims()),
        streams.public: operator.sign(
            streams.public, prefix, account_claims(exports=[_export(subject) for subject in subjects], jetstream=True)
        ),
        parts.public: operator.sign(
            parts.public, f"{prefix}_PARTS", account_claims(imports=[_import(subject, streams, parts) for subject in subjects])
        ),
    }
    about = {"type": "operator", "system_account": keys["system"].public}
    lines = [
        f"max_control_line: {CONTROL_LINE}",
        f"operator: {operator.sign(operator.public, f'headrace {topology.subjects.prefix}', about)}",
        f"system_account: {keys['system'].public}",
        "resolver: MEMORY",
        "resolver_preload: {",
        *(f"  {key}: {token}" for key, token in accounts.items()),
        "}",
    ]
    return "\n".join(lines) + "\n"


def account_claims(
    *, exports: list[dict[str, Any]] | None = None, imports: list[dict[str, Any]] | None = None, jetstream: bool = False
) -> dict[str, Any]:
    limits = {**_LIMITS, **(_JETSTREAM if jetstream else {})}
    found: dict[str, Any] = {"type": "account", "limits": limits, "default_permissions": {"pub": {}, "sub": {}}}
    if exports:
        found["exports"] = exports
    if imports:
        found["imports"] = imports
    return found


def _export(subject: str) -> dict[str, Any]:
    many = subject == API_EXPORT  # a pull and a batch have many answers
    return {
        "name": subject,
        "subject": subject,
        "type": "service",
        "token_req": True,
        "response_type": "Stream" if many else "Singleton",
    }


def _import(subject: str, streams: SigningKey, parts: SigningKey) -> dict[str, Any]:
    activation = streams.sign(parts.public, subject, {"type": "activation", "subject": subject, "kind": "service"})
    found = {"name": subject, "subject": subject, "account": streams.public, "token": activation, "type": "service"}
    return {**found, "local_subject": f"{PARTS_API}.>"} if subject == API_EXPORT else found


def _signing_key(folder: Path, name: str, kind: str) -> SigningKey:
    path = folder / (name + SEED)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if path.exists():
            return SigningKey(path.read_text().strip())
    except (OSError, ConnectError) as error:
        raise LoginFileUnusable(f"the signing key {path} cannot be used: {error}") from None
    key = SigningKey.new(kind)
    _write(path, key.seed + "\n")
    return key


def _credentials(token: str, seed: str) -> str:
    return (
        f"-----BEGIN NATS USER JWT-----\n{token}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def _write(path: Path, text: str) -> None:
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(text)
    except OSError as error:
        raise LoginFileUnusable(f"{path} cannot be written: {error.strerror}") from None
