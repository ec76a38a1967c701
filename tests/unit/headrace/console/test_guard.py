"""Pages of other sites reach nothing, and nothing is changed without an admin key."""

from __future__ import annotations

import time
from typing import Any

import pytest

from headrace.broker.keys.key_texts import digest_of
from headrace.broker.keys.records import KeyHash, KeyRecord
from headrace.console.guard import KEY_HEADER, ConsoleGuard
from headrace.frontend.errors import Forbidden, HostRefused, OriginRefused, Unauthorized

KEY = "k" * 32


def guard(*records: KeyRecord, host: str = "127.0.0.1", private: bool = False, key: str = KEY) -> ConsoleGuard:
    async def stored() -> list[KeyRecord]:
        return list(records)

    return ConsoleGuard(host=host, key=key, private=private, stored=stored)


def record(text: str, **more: Any) -> KeyRecord:
    hashes = [KeyHash(sha256=digest_of(text.encode()))]
    return KeyRecord(**({"id": "a", "name": "a", "tenant": "_", "hashes": hashes, "scopes": ["admin"], "created": 1.0} | more))


def test_a_page_whose_name_leads_here_is_refused() -> None:
    with pytest.raises(HostRefused):
        guard().check_page("GET", {"host": "evil.example:8001"})


def test_a_page_of_another_site_may_not_ask() -> None:
    with pytest.raises(OriginRefused):
        guard().check_page("POST", {"host": "localhost:8001", "origin": "https://evil.example"})
    with pytest.raises(OriginRefused):
        guard().check_page("POST", {"host": "localhost:8001", "sec-fetch-site": "cross-site"})


def test_the_consoles_own_page_may_ask() -> None:
    guard().check_page("POST", {"host": "localhost:8001", "origin": "http://localhost:8001"})


async def test_without_a_key_it_only_shows() -> None:
    await guard().check_reader({})
    with pytest.raises(Forbidden):
        await guard().check_admin({})
    with pytest.raises(Forbidden):
        await guard().check_admin({KEY_HEADER: "wrong"})
    await guard().check_admin({KEY_HEADER: KEY})


@pytest.mark.parametrize("more", [{"private": True}, {"host": "0.0.0.0"}])
async def test_a_private_or_reachable_console_shows_nothing_without_the_key(more: dict[str, Any]) -> None:
    with pytest.raises(Unauthorized):
        await guard(**more).check_reader({})
    await guard(**more).check_reader({KEY_HEADER: KEY})


async def test_an_empty_key_opens_nothing() -> None:
    assert not await guard(key="").is_admin({KEY_HEADER: ""})
    assert not await guard(key="").is_admin({})


@pytest.mark.parametrize(
    ("more", "opens"),
    [
        ({}, True),
        ({"scopes": ["generate", "metrics"]}, False),
        ({"revoked": 2.0}, False),
        ({"expires": 2.0}, False),
        ({"hashes": [KeyHash(sha256=digest_of(b"api-key"), until=2.0)]}, False),
        ({"hashes": [KeyHash(sha256=digest_of(b"api-key"), until=time.time() + 1000)]}, True),
    ],
)
async def test_an_api_key_opens_the_console_only_with_the_scope_admin_and_while_it_is_good(
    more: dict[str, Any], opens: bool
) -> None:
    assert await guard(record("api-key", **more)).is_admin({KEY_HEADER: "api-key"}) is opens
