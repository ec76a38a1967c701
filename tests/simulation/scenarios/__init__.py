"""What Headrace relies on in a NATS server, as short scenarios.

Each runs against the simulated server and against a real one (`test_server_semantics.py`).  A scenario must leave room for
slow machines: times are checked against bounds that only a wrong server would miss.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from tests.simulation.scenarios import consumers, plain_messages, redelivery, storage, stream_publishes
from tests.simulation.scenarios.bed import Bed, run, topology

__all__ = ["SCENARIOS", "run", "topology"]

SCENARIOS: dict[str, Callable[[Bed], Awaitable[None]]] = {
    name: made
    for part in (stream_publishes, redelivery, consumers, storage, plain_messages)
    for name, made in vars(part).items()
    if asyncio.iscoroutinefunction(made) and made.__module__ == part.__name__ and name[0] != "_"
}
