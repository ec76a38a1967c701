"""Injects duplicate publishes, as a publisher does whose first acknowledgement was lost."""

from __future__ import annotations

import asyncio

from headrace.broker.errors import WireError
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects

_MOST = 16
_MSG_ID = "nats-msg-id"
_PUBLISH_TIMEOUT_S = 1.0


async def publish_duplicates(connection: Connection, names: Subjects, *, for_s: float) -> int:
    """Publish again every request and placement seen within `for_s` seconds, at most 16. Returns their number.

    The copy has no message id, because the server would drop it as a duplicate.
    """
    seen: asyncio.Queue[Message] = asyncio.Queue(_MOST)
    known: set[tuple[str, bytes]] = set()  # The subscriptions also deliver the copies.

    def on_message(message: Message) -> None:
        key = (message.subject, message.data)
        if key not in known and not seen.full():
            known.add(key)
            seen.put_nowait(message)

    wanted = (f"{names.prefix}.req.>", f"{names.prefix}.work.>")
    subscriptions = [await connection.subscribe(subject, on_message) for subject in wanted]
    loop = asyncio.get_running_loop()
    until_s, count = loop.time() + for_s, 0
    try:
        while count < _MOST:
            async with asyncio.timeout_at(until_s):
                message = await seen.get()
            headers = {name: value for name, value in (message.headers or {}).items() if name.lower() != _MSG_ID}
            try:
                await connection.publish(message.subject, message.data, headers=headers, timeout_s=_PUBLISH_TIMEOUT_S)
            except JetStreamError:
                continue  # A fault may be made to the server at the same time.
            count += 1
    except (TimeoutError, WireError):
        pass
    finally:
        for subscription in subscriptions:
            await subscription.unsubscribe()
    return count
