"""Addresses that other machines reach, and what must be said before a frontend listens there."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.frontend.auth.caller import exposure_problem, is_loopback, tenants_salt
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import chat
from tests.support.frontend.keyed import Keyed


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


def test_no_salt_that_a_client_names_is_that_of_another_tenant() -> None:
    salts = {
        tenants_salt(tenant, asked) for tenant in ("a", "b", "ab") for asked in (None, "a", "b", "\0a", tenants_salt("a", None))
    }
    assert len(salts) == 15


async def test_prompt_and_engine_get_the_same_salt_of_the_tenant() -> None:
    bed = Keyed()
    one, two = bed.key("one"), bed.key("two")
    for key in (one, two, one):
        assert (await bed.ask(key, body=chat(), x_request_id="r")).status == 200
    first, second, third = bed.ingress.jobs
    assert first.generation.cache_salt == third.generation.cache_salt == tenants_salt("one", None)
    assert second.generation.cache_salt == tenants_salt("two", None)
    assert first.hashes == third.hashes != second.hashes
