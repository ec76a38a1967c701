"""`/tokenize` and `/detokenize`."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from tests.support.frontend.fakes import CARD, FILES, MODEL, FakeIngress, FakeServed, chat, frontend, post

URL = "/tokenize"


async def ask(body: Any, path: str = URL, **settings: Any) -> Any:
    return await post(frontend(FakeIngress(), **settings).app, body, path)


@pytest.mark.parametrize("path", ["/tokenize", "/v1/tokenize"])
async def test_a_prompt_has_its_tokens_counted_and_listed(path: str) -> None:
    call = await ask({"model": MODEL, "prompt": "hé"}, path)
    assert call.status == 200
    body = call.json()
    assert (body["count"], body["max_model_len"], len(body["tokens"]), body["token_strs"]) == (3, 512, 3, None)


async def test_token_strings_are_those_of_the_vocabulary() -> None:
    body = (await ask({"prompt": "a b", "return_token_strs": True})).json()
    assert body["token_strs"] == ["a", "Ġ", "b"]


async def test_a_conversation_gives_the_tokens_that_the_chat_route_sends() -> None:
    ingress = FakeIngress()
    app = frontend(ingress).app
    await post(app, chat())
    body = (await post(app, {**chat(), "return_token_strs": True}, URL)).json()
    from headrace.broker.codec import unpack_u32

    assert body["tokens"] == unpack_u32(ingress.jobs[0].generation.token_ids)
    assert "".join(body["token_strs"]).endswith("<assistant>")


async def test_a_conversation_can_be_left_open() -> None:
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "I am"}]
    open_ended = (await ask({"messages": messages, "continue_final_message": True, "return_token_strs": True})).json()
    assert "".join(open_ended["token_strs"]).endswith("<assistant>IĠam")
    closed = (await ask({"messages": messages, "add_generation_prompt": False, "return_token_strs": True})).json()
    assert "".join(closed["token_strs"]).endswith("IĠam</s>")


async def test_what_is_too_long_for_the_model_is_counted_all_the_same() -> None:
    assert (await ask({"prompt": "x" * 2000})).json()["count"] == 2000


async def test_nothing_has_no_tokens() -> None:
    assert (await ask({"prompt": ""})).json() == {"count": 0, "max_model_len": 512, "tokens": [], "token_strs": None}


async def test_tokens_become_text_again() -> None:
    ids = (await ask({"prompt": "Grüße, 漢 </s>"})).json()["tokens"]
    for path in ("/detokenize", "/v1/detokenize"):
        assert (await ask({"model": MODEL, "tokens": ids}, path)).json() == {"prompt": "Grüße, 漢 </s>"}
    assert (await ask({"tokens": []}, "/detokenize")).json() == {"prompt": ""}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (URL, {}, "prompt"),
        (URL, {"prompt": "a", "messages": [{"role": "user", "content": "b"}]}, "prompt"),
        (URL, {"messages": []}, "messages"),
        (URL, {"messages": [{"role": "user", "content": "a"}], "chat_template": "x"}, "chat_template"),
        (URL, chat(add_generation_prompt=True, continue_final_message=True), "continue_final_message"),
        (URL, {"prompt": 1}, "prompt"),
        ("/detokenize", {}, "tokens"),
        ("/detokenize", {"tokens": [1, 257]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens[0]"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
    ],
)
async def test_a_wrong_request_is_a_400_that_names_the_parameter(path: str, body: Any, param: str) -> None:
    call = await ask(body, path)
    assert (call.status, call.error["param"]) == (400, param)


async def test_with_several_models_one_must_be_named() -> None:
    ingress = FakeIngress()
    ingress.models.served["other"] = FakeServed(CARD.__class__(model="other", pool="o", context_length=8, block_size=16), FILES)
    app = frontend(ingress).app
    call = await post(app, {"prompt": "a"}, URL)
    assert (call.status, call.error["param"]) == (400, "model")
    assert f"{MODEL}, other" in call.error["message"]
    assert (await post(app, {"prompt": "a", "model": "none"}, URL)).status == 404


async def test_long_ones_are_worked_on_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from headrace.frontend.prompts.prompt_encoder import PromptEncoder

    where: list[int] = []
    real = PromptEncoder.decode

    def decode(self: PromptEncoder, ids: Any) -> str:
        where.append(threading.get_ident())
        return real(self, ids)

    monkeypatch.setattr(PromptEncoder, "decode", decode)
    app = frontend(FakeIngress(), inline_prompt_bytes=10).app
    for count in (5, 50):
        await post(app, {"tokens": [65] * count}, "/detokenize")
    assert [there == threading.get_ident() for there in where] == [True, False]
