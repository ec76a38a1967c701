"""`ollama`: the Python client of Ollama."""

from __future__ import annotations

import ollama
import pytest
from conftest import CHAT, EMBED, called
from pydantic import BaseModel

HI = [{"role": "user", "content": "Say hello."}]
SHORT = {"num_predict": 8}


class Place(BaseModel):
    city: str
    size: int


@pytest.fixture
def client(url: str) -> ollama.Client:
    return ollama.Client(host=url)


def test_models_are_listed_and_described(client: ollama.Client) -> None:
    assert [model.model for model in client.list().models] == [CHAT]
    assert [model.model for model in client.ps().models] == [CHAT]
    shown = client.show(CHAT)
    assert shown.capabilities is not None
    assert "tools" in shown.capabilities
    assert shown.modelinfo is not None
    assert shown.modelinfo["headrace.context_length"] > 0


def test_a_chat_whole_and_streamed(client: ollama.Client) -> None:
    answer = client.chat(CHAT, HI, options=SHORT)
    assert (answer.done_reason, answer.eval_count) == ("length", 8)
    assert answer.message.content or answer.message.thinking
    chunks = list(client.chat(CHAT, HI, options=SHORT, stream=True))
    assert (chunks[-1].done, chunks[-1].eval_count) == (True, 8)


def test_a_prompt_whole_streamed_and_raw(client: ollama.Client) -> None:
    assert client.generate(CHAT, "Say hello.", options=SHORT).eval_count == 8
    assert list(client.generate(CHAT, "Say hello.", options=SHORT, stream=True))[-1].done
    assert client.generate(CHAT, "Say", raw=True, options=SHORT).eval_count == 8
    assert client.generate(CHAT).done_reason == "load"


def test_an_answer_of_a_given_shape(client: ollama.Client) -> None:
    content = client.chat(CHAT, HI, format=Place.model_json_schema()).message.content
    assert Place.model_validate_json(content or "")


def test_a_call_and_its_result(client: ollama.Client) -> None:
    def weather(city: str) -> str:
        """The weather in a city.

        Args:
            city: its name
        """
        return city

    call = {"function": {"name": "weather", "arguments": {"city": "Oslo"}}}
    turns = [*HI, {"role": "assistant", "tool_calls": [call]}, {"role": "tool", "tool_name": "weather", "content": "-3"}]
    assert client.chat(CHAT, turns, tools=[weather], options=SHORT).done
    assert called("weather", city="Oslo")


def test_vectors(embed_url: str) -> None:
    client = ollama.Client(host=embed_url)
    assert len(client.embed(EMBED, ["a", "b"]).embeddings) == 2
    assert client.embeddings(EMBED, "a").embedding


def test_what_is_not_served_is_an_error_with_a_reason(client: ollama.Client) -> None:
    with pytest.raises(ollama.ResponseError, match="pulling models are not served here"):
        client.pull("llama3")
    with pytest.raises(ollama.ResponseError, match="acme/chat"):
        client.chat("other", HI)
