"""Describes API keys as records: the tenant that each stands for, what it may do, how much, and for how long."""

from __future__ import annotations

from typing import Literal, get_args

import msgspec

from headrace.broker.messages.base import Record

Scope = Literal[
    "generate",
    "embed",
    "tokens",
    "models",
    "stored",
    "files",
    "batches",
    "priority",
    "direct",
    "act_as",
    "metrics",
    "admin",
]
SCOPES: tuple[str, ...] = get_args(Scope)

CLIENT_SCOPES: tuple[Scope, ...] = ("generate", "embed", "tokens", "models", "stored", "files", "batches")
"""What a key may do unless it is told: everything that clients do for their own tenant."""

SCOPE_TEXTS: dict[str, str] = {
    "generate": "chats, completions, responses, messages, speech; cancelling them",
    "embed": "embeddings, scores, ranks and classes",
    "tokens": "tokenising and counting tokens",
    "models": "listing models",
    "stored": "stored responses, chats, conversations and durable streams",
    "files": "files and uploads",
    "batches": "batches",
    "priority": "service_tier priority and the field priority",
    "direct": "x-headrace-worker, labels and x-headrace-explain",
    "act_as": "x-headrace-tenant: speak for other tenants",
    "metrics": "/metrics and /load",
    "admin": "loading and unloading adapters",
}


class Limits(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The most that a key or its tenant may use; 0 is no limit. Tokens are those of prompts and answers."""

    requests_per_minute: int = 0
    tokens_per_minute: int = 0
    concurrent: int = 0
    tokens_per_day: int = 0

    @property
    def any(self) -> bool:
        """Return True if anything is limited."""
        return bool(self.requests_per_minute or self.tokens_per_minute or self.concurrent or self.tokens_per_day)


NO_LIMITS = Limits()


class KeyHash(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """The SHA-256 of one text of a key. `until`: the Unix time up to which it is good after a rotation; 0 has no such end."""

    sha256: bytes
    until: float = 0.0


class KeyRecord(Record, frozen=True, kw_only=True):
    """An API key as it is stored, under its public id. Times are Unix times, 0 = never; `models` are patterns, none = all.

    `limits` are the key's own, `tenant_limits` those of all keys of its tenant together: the newest key of the tenant that has
    some decides.
    """

    id: str
    name: str
    tenant: str
    hashes: list[KeyHash]
    scopes: list[str]
    created: float
    models: list[str] = msgspec.field(default_factory=list)
    limits: Limits = NO_LIMITS
    tenant_limits: Limits = NO_LIMITS
    expires: float = 0.0
    revoked: float = 0.0
    created_by: str = ""

    def state(self, now: float) -> Literal["active", "expired", "revoked"]:
        """Return whether the key is good at Unix time `now`."""
        if self.revoked:
            return "revoked"
        return "expired" if self.expires and now >= self.expires else "active"
