"""Addresses that other machines reach, and what must be said before a frontend listens there."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.frontend.auth.exposure import exposure_problem, is_loopback
from headrace.frontend.settings import FrontendSettings


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.9.1", "localhost", "::1", "[::1]"])
def test_loopback_addresses_need_nothing(host: str) -> None:
    assert is_loopback(host)
    assert exposure_problem(FrontendSettings(host=host)) is None


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "gpu.example", ""])
def test_other_addresses_need_keys_or_the_word(host: str) -> None:
    problem = exposure_problem(FrontendSettings(host=host))
    assert problem is not None
    for way in ("--api-key", "--auth keys", "--insecure"):
        assert way in problem
    ways: list[dict[str, Any]] = [{"api_key": ("k",)}, {"auth": "keys"}, {"insecure": True}]
    for enough in ways:
        assert exposure_problem(FrontendSettings(host=host, **enough)) is None
