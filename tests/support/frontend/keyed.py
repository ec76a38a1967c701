"""A frontend without a broker in which keys are in force, and requests with them."""

from __future__ import annotations

from typing import Any

from headrace.broker.codec import encode
from headrace.broker.keys import CLIENT_SCOPES, KeyHash, KeyRecord, digest_of, new_key_id, new_key_text
from headrace.frontend.app import Frontend, build_frontend
from headrace.frontend.auth.key_ring import KeyRing
from headrace.frontend.settings import FrontendSettings
from headrace.jetstream.ports import Change
from tests.support.frontend.fakes import Call, FakeIngress, Script, chat


class Keyed:
    """Makes keys and sends requests with them."""

    def __init__(self, script: Script | None = None, **settings: Any) -> None:
        self.ingress = FakeIngress(script)
        wishes = FrontendSettings(**settings)
        self.ring = KeyRing(wishes)
        self.frontend: Frontend = build_frontend(self.ingress, wishes, ring=self.ring)

    def key(self, tenant: str = "acme", **more: Any) -> str:
        key_id = new_key_id()
        text = new_key_text(key_id)
        values = {"name": tenant, "scopes": list(CLIENT_SCOPES), "created": 1.0, **more}
        record = KeyRecord(id=key_id, tenant=tenant, hashes=[KeyHash(sha256=digest_of(text.encode()))], **values)
        self.ring.apply(Change(key_id, encode(record), 1))
        return text

    async def ask(
        self, key: str | None, path: str = "/v1/chat/completions", body: Any = None, *, method: str = "POST", **headers: str
    ) -> Call:
        given = {"authorization": f"Bearer {key}"} if key is not None else {}
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        sent = chat() if body is None and method == "POST" else body
        return await Call(self.frontend.app, path, sent, method=method, headers={**given, **named}).run()
