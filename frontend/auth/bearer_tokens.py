"""Takes signed tokens (JWT) of an identity provider in place of API keys, as OpenID Connect issues them."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from headrace.broker.keys.key_texts import digest_of
from headrace.broker.keys.records import CLIENT_SCOPES
from headrace.frontend.auth.caller import Caller
from headrace.frontend.auth.exposure import is_loopback
from headrace.frontend.errors import SigningKeysUnusable
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.subjects import tenant_token

log = structlog.get_logger()

ALGORITHMS = (*("RS256", "RS384", "RS512", "PS256", "PS384", "PS512"), *("ES256", "ES384", "ES512", "EdDSA"))
"""Signatures by a private key only: with a shared secret every holder of the provider's keys could sign."""

REFRESH_S = 300.0
LEAST_REFRESH_S = 10.0  # after a token was signed by an unknown key
LEEWAY_S = 30.0
MOST_TOKEN = 16 * 1024
MOST_KEYS_BYTES = 1 << 20
KNOWN = 4096  # verified tokens that are remembered until they expire
_FETCH_S = 10.0


class BearerTokens:
    """Verifies tokens against the provider's keys, which `run` keeps current. A verified token is looked up by its hash.

    No request waits for the provider: a token of an unknown key is refused, and the keys are asked for at once.
    """

    def __init__(self, settings: FrontendSettings, *, wall: Callable[[], float] = time.time) -> None:
        """Raises SigningKeysUnusable where the package PyJWT is missing or the address is not safe to ask."""
        self._source = settings.jwt_keys or ""
        self._issuer = settings.jwt_issuer
        self._audience = settings.jwt_audience
        self._claim = settings.jwt_tenant_claim
        self._wall = wall
        self._keys: dict[str, Any] = {}
        self._known: OrderedDict[bytes, Caller] = OrderedDict()
        self._wanted = asyncio.Event()
        try:
            import jwt  # two hundredths of a second, for those who use it
        except ImportError:
            raise SigningKeysUnusable("frontend.jwt_keys needs the package PyJWT: pip install 'headrace[oidc]'") from None
        self._jwt = jwt
        address = urlsplit(self._source)
        if address.scheme == "http" and not is_loopback(address.hostname or ""):
            raise SigningKeysUnusable(f"frontend.jwt_keys = {self._source!r}: signing keys come by https: or from a file")

    async def load(self) -> None:
        """Read the keys once. Raises SigningKeysUnusable, after which no token is good until `run` has read them."""
        found = await asyncio.to_thread(self._read)
        try:
            keys = self._jwt.PyJWKSet.from_dict(found).keys
        except (self._jwt.PyJWTError, AttributeError, TypeError) as error:
            raise SigningKeysUnusable(f"{self._source} is no set of keys (JWKS): {error}") from None
        self._keys = {key.key_id or "": key for key in keys if key.key_type != "oct"}
        self._known.clear()  # a key that the provider has withdrawn signs nothing any more

    async def run(self) -> None:
        """Read the keys again every few minutes, and soon after an unknown one was used, until cancelled."""
        while True:
            self._wanted.clear()
            await asyncio.sleep(LEAST_REFRESH_S)
            try:
                async with asyncio.timeout(REFRESH_S - LEAST_REFRESH_S):
                    await self._wanted.wait()
            except TimeoutError:
                pass
            try:
                await self.load()
            except SigningKeysUnusable as error:
                log.warning("jwt.keys_not_read", error=str(error))

    def find(self, text: bytes) -> Caller | None:
        """Return the caller of a token, None unless it is valid now."""
        digest = digest_of(text)
        caller = self._known.get(digest)
        if caller is None:
            caller = self._verified(text)
            if caller is None:
                return None
            self._known[digest] = caller
            if len(self._known) > KNOWN:
                self._known.popitem(last=False)
        return caller if caller.until > self._wall() else None

    def _verified(self, text: bytes) -> Caller | None:
        if len(text) > MOST_TOKEN:
            return None
        try:
            name = self._jwt.get_unverified_header(text).get("kid", "")
            key = self._keys.get(name) or (next(iter(self._keys.values())) if not name and len(self._keys) == 1 else None)
            if key is None:
                self._wanted.set()
                return None
            claims = self._jwt.decode(
                text,
                key=key,
                algorithms=ALGORITHMS,
                audience=self._audience,
                issuer=self._issuer,
                leeway=LEEWAY_S,
                options={"require": ["exp", "iss", "aud", "sub"]},
            )
        except (self._jwt.PyJWTError, ValueError, TypeError, AttributeError):
            return None
        tenant = claims.get(self._claim)
        if not isinstance(tenant, str) or not tenant:
            log.warning("jwt.no_tenant", claim=self._claim)
            return None
        who = hashlib.sha256(f"{claims['iss']}\0{claims['sub']}".encode()).hexdigest()[:16]
        return Caller(f"jwt-{who}", tenant_token(tenant), CLIENT_SCOPES, until=float(claims["exp"]) + LEEWAY_S)

    def _read(self) -> Any:
        try:
            if not self._source.startswith(("https://", "http://")):
                data = Path(self._source).expanduser().read_bytes()
            else:
                with urllib.request.urlopen(self._source, timeout=_FETCH_S) as answer:  # noqa: S310  # checked at the start
                    data = answer.read(MOST_KEYS_BYTES + 1)
            if len(data) > MOST_KEYS_BYTES:
                raise ValueError(f"more than {MOST_KEYS_BYTES} bytes")
            return json.loads(data)
        except (OSError, ValueError) as error:
            raise SigningKeysUnusable(f"the signing keys {self._source} cannot be read: {error}") from None
