"""`anthropic`: models, messages, and errors that the client knows."""

from __future__ import annotations

import anthropic
import pytest
from conftest import CHAT

HI = [{"role": "user", "content": "Say hello."}]


@pytest.fixture
def client(url: str) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)


def test_models_are_listed_and_described(client: anthropic.Anthropic) -> None:
    assert [model.id for model in client.models.list()] == [CHAT]
    model = client.models.retrieve(CHAT)
    assert (model.id, model.type, model.lifecycle) == (CHAT, "model", "active")
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.models.retrieve("acme/other")
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


def test_messages_whole_and_streamed(client: anthropic.Anthropic) -> None:
    assert client.messages.create(model=CHAT, messages=HI, max_tokens=8).stop_reason == "max_tokens"
    with client.messages.stream(model=CHAT, messages=HI, max_tokens=8) as stream:
        assert stream.get_final_message().usage.output_tokens == 8
    assert client.messages.count_tokens(model=CHAT, messages=HI).input_tokens > 0


def test_what_is_not_served_is_an_error_that_the_client_knows(client: anthropic.Anthropic) -> None:
    with pytest.raises(anthropic.NotFoundError) as caught:
        client.messages.batches.list()
    assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]
    with pytest.raises(anthropic.BadRequestError):
        client.messages.create(model=CHAT, messages=HI, max_tokens=0)
