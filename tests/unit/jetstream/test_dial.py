"""What is said of a server whose permissions can be passed in a published way, and of one that ends a connection."""

from __future__ import annotations

import pytest

from headrace.jetstream.context import ConnectOptions
from headrace.jetstream.dial import _connect_error, safer_version


@pytest.mark.parametrize(
    ("version", "safer"),
    [
        ("2.11.0", "2.11.16 or 2.15"),  # a user of one account could administer the JetStream of another
        ("2.11.15", "2.11.16 or 2.15"),
        ("2.11.16", None),
        ("v2.12.6", "2.12.7 or 2.15"),
        ("2.12.7-preview.1", None),
        ("2.13.4", "2.15"),
        ("2.14.2", "2.14.3 or 2.15"),
        ("2.14.3", None),
        ("2.14.unknown", "2.14.3 or 2.15"),
        ("2.15.0", None),
        ("3.0.0", None),
    ],
)
def test_a_version_with_published_ways_around_permissions_is_named(version: str, safer: str | None) -> None:
    assert safer_version(version) == safer


def test_a_connection_that_ends_while_tls_begins_is_told_what_it_may_want() -> None:
    tls, plain = ConnectOptions(servers=("tls://nats:4222",)), ConnectOptions(servers=("nats://nats:4222",))
    assert "client certificate" in str(_connect_error(tls, BrokenPipeError(32, "Broken pipe")))
    assert "client certificate" not in str(_connect_error(plain, BrokenPipeError(32, "Broken pipe")))
    assert "client certificate" not in str(_connect_error(tls, TimeoutError()))
