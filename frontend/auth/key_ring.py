"""The keys that a frontend knows, by their hashes: those that the operator gave, and those in the store."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence

import structlog

from headrace.broker.keys.key_texts import digest_of
from headrace.broker.keys.records import KeyRecord, Limits
from headrace.broker.keys.store import read_key
from headrace.frontend.auth.audit import key_changed
from headrace.frontend.auth.bearer_tokens import BearerTokens
from headrace.frontend.auth.caller import Caller, operators_caller
from headrace.frontend.auth.quotas import Quotas
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.ports import Change
from headrace.jetstream.subjects import tenant_token

log = structlog.get_logger()


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
        """Return the stored keys."""
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
