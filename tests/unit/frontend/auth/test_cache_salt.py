"""Salts of tenants."""

from __future__ import annotations

from headrace.frontend.auth.cache_salt import tenants_salt
from tests.support.frontend.fakes import chat
from tests.support.frontend.keyed import Keyed


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
