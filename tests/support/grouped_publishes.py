"""Publishes of stand-ins that are waited for together: each is a publish of its own."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Outgoing, PubAck


async def publish_each(
    publish: Callable[..., Awaitable[PubAck]], messages: Sequence[Outgoing], **options: float
) -> list[PubAck | JetStreamError]:
    """Publish messages at once, and return for each what came of it."""

    async def one(message: Outgoing) -> PubAck | JetStreamError:
        wishes = {
            name: value for name, value in message._asdict().items() if name not in ("subject", "data") and value is not None
        }
        try:
            return await publish(message.subject, message.data, **wishes, **options)
        except JetStreamError as error:
            return error

    return list(await asyncio.gather(*(one(message) for message in messages)))
