"""The address from which a machine reaches its server."""

from __future__ import annotations

import pytest

from headrace.jetstream.dial import address_of_route
from headrace.jetstream.errors import ServerUnreachable


@pytest.mark.parametrize(
    ("servers", "address"),
    [
        (("nats://127.0.0.1:4222",), "127.0.0.1"),
        (("127.0.0.1",), "127.0.0.1"),
        (("tls://user:secret@127.0.0.1:4443",), "127.0.0.1"),
        (("nats://no-such-host.invalid:4222", "nats://127.0.0.1"), "127.0.0.1"),
    ],
)
async def test_it_is_that_of_the_route_to_the_first_server_that_has_one(servers: tuple[str, ...], address: str) -> None:
    assert await address_of_route(servers) == address


async def test_without_a_route_the_servers_are_named() -> None:
    with pytest.raises(ServerUnreachable, match=r"no-such-host\.invalid"):
        await address_of_route(("nats://no-such-host.invalid:4222",))
