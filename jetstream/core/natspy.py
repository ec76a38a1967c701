"""Imports nats-py without its WebSocket client; all modules of this package take nats-py from here.

Where there is an aiohttp, and vLLM brings one, nats-py imports it: a fifth of the time that a part took to start.  An address
with `ws://` is refused (`context`).
"""

from __future__ import annotations

from headrace.jetstream.core.hidden_imports import hidden

__all__ = ["NUID", "PING_PROTO", "Client", "Subscription", "TcpTransport", "command", "errors"]

with hidden("aiohttp"):
    from nats import errors
    from nats.aio.client import PING_PROTO, Client
    from nats.aio.subscription import Subscription
    from nats.aio.transport import TcpTransport
    from nats.nuid import NUID
    from nats.protocol import command
