"""Models as Ollama's clients list and describe them."""

from __future__ import annotations

import msgspec

from headrace.broker.models.cards import MediaSlot
from tests.support.frontend.fakes import CARD, FILES, MODEL, TEMPLATE, FakeIngress, FakeServed, frontend, get, post


async def test_what_has_a_worker_is_listed() -> None:
    ingress = FakeIngress()
    app = frontend(ingress).app
    entry, alias = (await get(app, "/api/tags")).json()["models"]
    assert (entry["name"], entry["model"], entry["modified_at"]) == (MODEL, MODEL, "2023-11-14T22:13:20Z")
    assert (alias["name"], alias["model"]) == ("tiny", "tiny")
    assert len(entry["digest"]) == 64
    assert entry["details"]["families"] == []
    loaded, _ = (await get(app, "/api/ps")).json()["models"]
    assert (loaded["name"], loaded["context_length"]) == (MODEL, 512)
    ingress.models.served[MODEL].workers = 0
    assert (await get(app, "/api/tags")).json() == {"models": []}


async def test_the_digest_changes_with_the_card() -> None:
    ingress = FakeIngress()
    app = frontend(ingress).app
    before = (await get(app, "/api/tags")).json()["models"][0]["digest"]
    ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, context_length=64), FILES)
    assert (await get(app, "/api/tags")).json()["models"][0]["digest"] != before


async def test_a_model_is_described_by_its_card() -> None:
    ingress = FakeIngress()
    card = msgspec.structs.replace(CARD, tool_parser="x", reasoning_parser="y", media={"image": MediaSlot("<i>", 5)})
    ingress.models.served[MODEL] = FakeServed(card, FILES)
    for body in ({"model": f"{MODEL}:latest"}, {"name": "tiny"}):
        shown = (await post(frontend(ingress).app, body, "/api/show")).json()
        assert shown["capabilities"] == ["completion", "tools", "thinking", "vision"]
        info = shown["model_info"]
        assert info[f"{info['general.architecture']}.context_length"] == 512
        assert shown["template"] == TEMPLATE


async def test_the_version_is_that_of_the_api() -> None:
    answer = (await get(frontend(FakeIngress()).app, "/api/version")).json()
    assert tuple(int(part) for part in answer["version"].split(".")) >= (0, 6, 4)
