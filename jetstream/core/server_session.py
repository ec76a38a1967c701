"""Declares the view of a connection that consumers, buckets and object stores are built on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Protocol

from headrace.jetstream.core.api import JsApi
from headrace.jetstream.core.direct_get import Reader
from headrace.jetstream.core.raw_client import CoreClient
from headrace.jetstream.ports import PubAck


class ServerSession(Protocol):
    """A connection to a server, as the modules of this package use it. `headrace.jetstream.client.Connection` implements it.

    Modules take this protocol and not the connection, because the connection constructs them: no import runs in a circle.
    """

    api: JsApi
    reader: Reader

    @property
    def core(self) -> CoreClient:
        """The client underneath, for taps and raw writes."""

    @property
    def inbox(self) -> str:
        """The prefix of all inbox subjects of this connection."""

    def hooks(self, *, up: Callable[[], None], down: Callable[[], None]) -> AbstractContextManager[None]:
        """Call `up` and `down` as the connection comes and goes, while the context is open."""

    async def publish(
        self,
        subject: str,
        data: bytes,
        *,
        headers: Mapping[str, str] | None = None,
        msg_id: str | None = None,
        ttl_s: float | None = None,
        expect_last_subject_seq: int | None = None,
        timeout_s: float = 2.0,
    ) -> PubAck:
        """Store a message, as `headrace.jetstream.ports.messaging.Messaging.publish` does."""
