"""LangChain by OpenAI's, Anthropic's and Ollama's API."""

from __future__ import annotations

from typing import Any

import pytest
from conftest import CHAT, EMBED, called
from langchain_anthropic import ChatAnthropic
from langchain_core.messages import AIMessage, HumanMessage, ToolMessage
from langchain_core.tools import tool
from langchain_ollama import ChatOllama, OllamaEmbeddings
from langchain_openai import ChatOpenAI
from pydantic import BaseModel


@tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"It is cold in {city}."


class Place(BaseModel):
    """A place."""

    city: str
    size: int


def openai_chat(url: str, **more: Any) -> ChatOpenAI:
    return ChatOpenAI(base_url=f"{url}/v1", api_key="none", model=CHAT, max_tokens=64, **more)


def anthropic_chat(url: str, **more: Any) -> ChatAnthropic:
    return ChatAnthropic(base_url=url, api_key="none", model=CHAT, max_tokens=64, **more)


def ollama_chat(url: str, **more: Any) -> ChatOllama:
    return ChatOllama(base_url=url, model=CHAT, num_predict=64, **more)


MODELS = [openai_chat, anthropic_chat, ollama_chat]


@pytest.mark.parametrize("model", MODELS)
def test_a_chat_whole_and_streamed(model: Any, url: str) -> None:
    answer = model(url).invoke("Say hello.")
    assert answer.content
    assert answer.usage_metadata["output_tokens"] > 0
    chunks = list(model(url).stream("Say hello."))
    assert "".join(str(chunk.content) for chunk in chunks)


@pytest.mark.parametrize("model", [openai_chat, anthropic_chat])
def test_a_tool_that_must_be_called_and_its_result(model: Any, url: str) -> None:
    bound = model(url).bind_tools([weather], tool_choice="weather")
    asked = HumanMessage("How is the weather in Oslo?")
    answer = bound.invoke([asked])
    (call,) = answer.tool_calls
    assert (call["name"], list(call["args"])) == ("weather", ["city"])
    result = ToolMessage("cold", tool_call_id=call["id"])
    assert isinstance(model(url).invoke([asked, answer, result]), AIMessage)


def test_a_tool_called_by_choice(url: str) -> None:
    model = openai_chat(url, extra_body={"vllm_xargs": {"sim_answer": called("weather", city="Oslo")}})
    assert model.bind_tools([weather]).invoke("How is the weather?").tool_calls[0]["args"] == {"city": "Oslo"}
    chunks = list(model.bind_tools([weather]).stream("How is the weather?"))
    total = chunks[0]
    for chunk in chunks[1:]:
        total += chunk
    assert total.tool_calls[0]["args"] == {"city": "Oslo"}


@pytest.mark.parametrize(
    ("model", "method"),
    [
        (openai_chat, "json_schema"),
        (openai_chat, "function_calling"),
        (anthropic_chat, "function_calling"),
        (anthropic_chat, "json_schema"),
        (ollama_chat, "json_schema"),
    ],
)
def test_structured_output(model: Any, method: str, url: str) -> None:
    assert isinstance(model(url).with_structured_output(Place, method=method).invoke("Name a place."), Place)


def test_the_responses_api(url: str) -> None:
    assert openai_chat(url, use_responses_api=True).invoke("Say hello.").content


def test_vectors_by_ollamas_api(embed_url: str) -> None:
    vectors = OllamaEmbeddings(base_url=embed_url, model=EMBED).embed_documents(["a", "b"])
    assert len(vectors) == 2
