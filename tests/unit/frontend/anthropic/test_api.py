"""Models as Anthropic's clients read them, page by page."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.models.cards import MediaSlot
from headrace.frontend.anthropic.api import model_entry, model_page
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, frontend

HEADERS = {"anthropic-version": "2023-06-01"}
SERVED = [FakeServed(msgspec.structs.replace(CARD, model=f"m{i}"), FILES) for i in range(7)]


async def ask(path: str, query: str = "") -> Call:
    call = Call(frontend(FakeIngress()).app, path, method="GET", headers=HEADERS)
    call.scope["query_string"] = query.encode()
    return await call.run()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
async def test_the_listing_has_anthropics_keys(path: str) -> None:
    answer = (await ask(path)).json()
    assert (answer["has_more"], answer["first_id"], answer["last_id"]) == (False, MODEL, "tiny")
    entry, alias = answer["data"]
    assert alias == entry | {"id": "tiny", "display_name": "tiny"}
    # what the client makes of it: tests/integration/frontend/test_anthropic_client.py; importing that takes two seconds
    assert (entry["type"], entry["id"], entry["created_at"][:5], entry["max_input_tokens"]) == ("model", MODEL, "2023-", 512)


async def test_a_model_with_a_slash_in_its_name_is_found() -> None:
    answer = (await ask(f"/v1/models/{MODEL}")).json()
    assert (answer["type"], answer["id"]) == ("model", MODEL)


async def test_an_unknown_model_is_an_error_in_anthropics_shape() -> None:
    call = await ask("/v1/models/org/other")
    assert (call.status, call.json()["type"], call.error["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "after_id=nope", "before_id=nope"])
async def test_a_page_that_does_not_exist_is_a_400_that_names_the_parameter(query: str) -> None:
    call = await ask("/v1/models", query)
    assert (call.status, call.error["type"]) == (400, "invalid_request_error")
    assert query.partition("=")[0] in call.error["message"]


@given(st.integers(1, 9))
def test_all_pages_together_are_the_listing_in_both_directions(limit: int) -> None:
    for cursor, end in (("after_id", "last_id"), ("before_id", "first_id")):
        query, seen, more = {"limit": str(limit)}, list[str](), True
        if cursor == "before_id":
            query[cursor] = "m6"
        while more:
            page = model_page(SERVED, query)
            ids = [entry.id for entry in page.data]
            assert 1 <= len(ids) <= limit
            seen = [*seen, *ids] if cursor == "after_id" else [*ids, *seen]
            more = page.has_more
            query[cursor] = str(getattr(page, end))
        assert seen == [served.card.model for served in SERVED][: None if cursor == "after_id" else 6]


def test_capabilities_come_from_the_card() -> None:
    plain = model_entry(FakeServed(CARD, FILES)).capabilities
    assert (plain.image_input.supported, plain.thinking.supported, plain.structured_outputs.supported) == (False, False, True)
    card = msgspec.structs.replace(CARD, reasoning_parser="think", media={"image": MediaSlot("<i>", 5)})
    rich = model_entry(FakeServed(card, FILES)).capabilities
    assert (rich.image_input.supported, rich.thinking.supported) == (True, True)
