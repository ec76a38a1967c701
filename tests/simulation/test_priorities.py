"""What runs at the lowest priority has no real server, whose time limits would then be too short."""

import pytest

from headrace.jetstream.embedded_server import EmbeddedServer


def test_what_computes_in_virtual_time_is_marked(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("virtual")


def test_what_has_a_real_server_is_not(request: pytest.FixtureRequest, nats_server: EmbeddedServer) -> None:
    assert not request.node.get_closest_marker("virtual")
