"""Imports nats-py without its WebSocket client; all modules of this package take nats-py from here.

If aiohttp is installed, as it is with vLLM, nats-py imports it, which took a fifth of the start time of a process.  An address
with `ws://` is refused (`context`).
"""

from __future__ import annotations

from headrace.base.process import hidden

__all__ = ["NUID", "PING_PROTO", "Client", "Parser", "Subscription", "TcpTransport", "command", "errors"]

with hidden("aiohttp"):
    from nats import errors
    from nats.aio.client import PING_PROTO, Client
    from nats.aio.subscription import Subscription
    from nats.aio.transport import TcpTransport
    from nats.nuid import NUID
    from nats.protocol import command
    from nats.protocol.parser import Parser
