"""What an ingress says of a model while it does not know yet which ones there are."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.errors import BrokerUnavailable, UnknownModel
from headrace.broker.ingress.ingress import Ingress
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects


async def test_no_model_is_called_unknown_before_the_list_was_read(connection: Connection, subjects: Subjects) -> None:
    served = Ingress(connection, subjects)
    with pytest.raises(BrokerUnavailable, match="still being read"):
        served.models.get("m")
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(served.run())
        await served.wait_started(20)
        with pytest.raises(UnknownModel):
            served.models.get("m")
        running.cancel()
