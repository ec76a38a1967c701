"""API keys and signed tokens that a frontend accepts, and the audit log of refusals and of operators' changes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import time
import urllib.request
from collections import OrderedDict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import structlog

from headrace.broker.codec import decode
from headrace.broker.errors import WireError
from headrace.broker.keys import CLIENT_SCOPES, KeyRecord, Limits, digest_of, read_key
from headrace.broker.messages.operator import OperatorAct
from headrace.frontend.auth.caller import Caller, caller_of, is_loopback, operators_caller
from headrace.frontend.auth.quotas import Quotas
from headrace.frontend.errors import SigningKeysUnusable
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.ports import Change, Message
from headrace.jetstream.subjects import tenant_token

# Writes the audit log: who was refused and why, and what operators changed. Its events begin with `audit.`.

log = structlog.get_logger()

MOST_PER_S = 20  # refusals that are logged; more are counted, so that an attack cannot fill the disk
REFUSALS = frozenset(
    {
        *("missing_api_key", "invalid_api_key", "permission_denied", "model_not_allowed", "tenant_not_allowed"),
        *("host_refused", "origin_refused", "rate_limit_exceeded"),
    }
)


class AuditLog:
    def __init__(self, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._second = 0
        self._written = self._left_out = 0

    def refused(self, scope: Any, code: str, **fields: object) -> None:
        second = int(self._clock())
        if second != self._second:
            if self._left_out:
                log.warning("audit.left_out", refusals=self._left_out)
            self._second, self._written, self._left_out = second, 0, 0
        if self._written >= MOST_PER_S:
            self._left_out += 1
            return
        self._written += 1
        log.warning("audit.refused", code=code, **who(scope), **fields)


def who(scope: Any) -> dict[str, object]:
    """Return the fields that say who sent a request: key, tenant, address."""
    caller = caller_of(scope)
    key = caller.key if caller is not None else scope.get("headrace.bad_key")
    client = scope.get("client")
    return {
        "key": key or "none",
        "tenant": scope.get("headrace.tenant") or "none",
        "peer": client[0] if client else "unknown",
        "request_id": scope.get("headrace.request_id", ""),
    }


def key_changed(old: KeyRecord | None, new: KeyRecord | None) -> None:
    """Log what became of a key in the store. `created_by` is what its maker's machine says."""
    record = new or old
    if record is None or old == new:
        return
    if old is None:
        event = "audit.key_created"
    elif new is None:
        event = "audit.key_deleted"
    elif new.revoked and not old.revoked:
        event = "audit.key_revoked"
    else:
        event = "audit.key_rotated" if new.hashes != old.hashes else "audit.key_changed"
    log.warning(event, key=record.id, name=record.name, tenant=record.tenant, scopes=record.scopes, by=record.created_by)


def operator_acted(message: Message) -> None:
    """Log a command of an operator, as the process that ran it has told."""
    try:
        act = decode(OperatorAct, message.data)
    except WireError as error:
        log.warning("audit.unreadable", error=str(error))
        return
    log.warning("audit.operator_command", command=act.command, by=act.by, details=act.details)


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


class KeyRing:
    """A dict of callers by hash. A look-up hashes the text once, and never compares it: its time says nothing about any key.

    `quotas` are those of the keys and their tenants. Keys are in force as soon as one was given or stored, and stay so when the
    last one is revoked or expires: its record stays.
    """

    def __init__(self, settings: FrontendSettings, *, wall: Callable[[], float] = time.time) -> None:
        self._always = settings.asks_for_keys
        self._wall = wall
        self._given = {digest_of(text.encode()): operators_caller(n) for n, text in enumerate(settings.api_key, 1)}
        self._stored: dict[str, KeyRecord] = {}
        self._callers: dict[bytes, Caller] = dict(self._given)
        self._tenants: frozenset[str] = frozenset()
        self.in_force = self._always
        self.audited = False  # from the end of the first listing on, changes go to the audit log
        self.quotas = Quotas(wall=wall)
        self._isolation = settings.cache_isolation
        self.tokens = BearerTokens(settings, wall=wall) if settings.jwt_keys is not None else None

    @property
    def isolates(self) -> bool:
        """Return True if the prefix caches of tenants are kept apart."""
        return self._isolation == "on" or (self._isolation == "auto" and self.in_force)

    def has_tenant(self, tenant: str) -> bool:
        """Return True if a stored key that is not revoked has this tenant, given as its token."""
        return tenant in self._tenants

    def find(self, text: bytes) -> Caller | None:
        """Return the caller of a key, None if it is unknown, revoked or expired."""
        now = self._wall()  # for unknown keys, too: what is done is the same for each that is not valid
        caller = self._callers.get(digest_of(text))
        if caller is None and self.tokens is not None and text.count(b".") == 2:
            return self.tokens.find(text)
        return caller if caller is not None and caller.until > now else None

    def apply(self, change: Change) -> None:
        """Take a change of the store. A key that cannot be read is no key."""
        record = read_key(change.key, change.value) if change.value is not None else None
        if self.audited:
            key_changed(self._stored.get(change.key), record)
        if record is None:
            self._stored.pop(change.key, None)
        else:
            self._stored[change.key] = record
        if change.value is not None and not self.in_force:
            self.in_force = True
            log.info("keys.in_force", reason="a key is stored")
        self._rebuild()

    def records(self) -> Sequence[KeyRecord]:
        return tuple(self._stored.values())

    def _rebuild(self) -> None:
        callers = dict(self._given)
        tenants: dict[str, Limits] = {}
        named = set()
        for record in sorted(self._stored.values(), key=lambda record: record.created):
            if record.tenant_limits.any:
                tenants[tenant_token(record.tenant)] = record.tenant_limits
            if not record.revoked:
                named.add(tenant_token(record.tenant))
                for each in record.hashes:
                    until = min(record.expires or math.inf, each.until or math.inf)
                    callers[each.sha256] = Caller.of(record, until=until)
        self._callers, self._tenants = callers, frozenset(named)
        self.quotas.limit_tenants(tenants)
