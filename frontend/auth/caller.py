"""The caller of a request, its rights, the salt of its prefix cache, and the addresses that need no key."""

from __future__ import annotations

import hashlib
import ipaddress
import math
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import Any, TypeVar

from headrace.broker.keys import NO_LIMITS, SCOPES, KeyRecord, Limits
from headrace.frontend.errors import Forbidden
from headrace.frontend.ports import Served
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.subjects import DEFAULT_TENANT, tenant_token

_KNOWN_MODELS = 1024
S = TypeVar("S", bound=Served)


class Caller:
    """A key, ready to be asked. `key` is its public id, `tenant` a subject token, `until` Unix time."""

    __slots__ = ("_allowed", "_models", "key", "limits", "name", "scopes", "tenant", "until")

    def __init__(
        self, key: str, tenant: str, scopes: Iterable[str], *, models: Sequence[str] = (), until: float = math.inf
    ) -> None:
        self.key = key
        self.name = key
        self.tenant = tenant
        self.scopes = frozenset(scopes)
        self.limits: Limits = NO_LIMITS
        self.until = until
        self._models = tuple(models)
        self._allowed: dict[str, bool] = {}

    @classmethod
    def of(cls, record: KeyRecord, *, until: float) -> Caller:
        """Return the caller of a stored key, one of whose texts is good until `until`."""
        caller = cls(record.id, tenant_token(record.tenant), record.scopes, models=record.models, until=until)
        caller.name = record.name
        if record.limits.any:
            caller.limits = record.limits
        return caller

    def may_use(self, model: str) -> bool:
        if not self._models:
            return True
        known = self._allowed.get(model)
        if known is None:
            known = any(fnmatchcase(model, pattern) for pattern in self._models)
            if len(self._allowed) < _KNOWN_MODELS:
                self._allowed[model] = known
        return known

    def need(self, scope: str, what: str) -> None:
        """Raise Forbidden unless the key has the scope. `what` is the subject of the message."""
        if scope not in self.scopes:
            raise Forbidden(f"{what} needs the scope {scope}, which this API key has not")


def operators_caller(number: int) -> Caller:
    """Return the caller of a key that the operator gave at the start: it may do everything, and speak for any tenant."""
    return Caller(f"given-{number}", DEFAULT_TENANT, SCOPES)


def caller_of(scope: Any) -> Caller | None:
    """Return the caller of a request; None where no key is asked for, and for stored jobs."""
    caller: Caller | None = scope.get("headrace.caller")
    return caller


def covered(scope: Any, served: Sequence[S]) -> list[S]:
    caller = caller_of(scope)
    return [each for each in served if caller is None or caller.may_use(each.adapter or each.card.model)]


def check_model(scope: Any, *names: str | None) -> None:
    """Raise Forbidden if the caller's key covers none of the names by which a request means a model."""
    caller = caller_of(scope)
    if caller is None:
        return
    for name in names:
        if name and caller.may_use(name):
            return
    shown = next(name for name in names if name)
    raise Forbidden(f"this API key does not cover the model {shown!r}", param="model", code="model_not_allowed")


LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")


def is_loopback(host: str) -> bool:
    """Return True if only processes of this machine reach what listens on this address."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def exposure_problem(settings: FrontendSettings) -> str | None:
    """Return why a frontend must not start with these settings, as one sentence that says what to do; None if it may."""
    if is_loopback(settings.host) or settings.insecure or settings.asks_for_keys:
        return None
    return (
        f"{settings.host} can be reached from other machines: give --api-key (or HEADRACE_API_KEY), or --auth keys and make "
        "keys with `headrace keys create`, or --insecure to serve all who reach it"
    )


@lru_cache(maxsize=4096)
def tenants_salt(tenant: str, asked: str | None) -> str:
    """Return 128 bits of a hash of the tenant and the salt that the client asked for, as hexadecimal digits.

    Blocks of prompts are found by hashes that begin with the salt, so a tenant finds only its own, whatever salt another names.
    """
    return hashlib.sha256(f"{tenant}\0{asked or ''}".encode()).hexdigest()[:32]
