"""pydantic-ai: agents with tools and typed results, by chat and by the Responses API.

Its model for Anthropic's API fails with `anthropic` 2.12 before it sends anything, so that is left out.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import httpx
import pytest
from conftest import CHAT, Scripted, called
from openai import AsyncOpenAI
from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.openai import OpenAIProvider

Made = Callable[..., tuple[httpx.AsyncClient, Scripted]]


class Place(BaseModel):
    city: str
    size: int


def chat(url: str, http: httpx.AsyncClient | None) -> Any:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
    return OpenAIChatModel(CHAT, provider=OpenAIProvider(openai_client=client))


def responses(url: str, http: httpx.AsyncClient | None) -> Any:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http)
    return OpenAIResponsesModel(CHAT, provider=OpenAIProvider(openai_client=client))


MODELS = [chat, responses]


@pytest.mark.parametrize("model", MODELS)
async def test_a_typed_result(model: Any, url: str) -> None:
    agent = Agent(model(url, None), output_type=Place, model_settings={"max_tokens": 200})
    assert isinstance((await agent.run("Name a place.")).output, Place)


@pytest.mark.parametrize("model", MODELS)
async def test_a_tool_is_called_and_its_result_answered(model: Any, url: str, scripted: Made) -> None:
    http, recorded = scripted(called("weather", city="Oslo"), "It is cold.")
    agent = Agent(model(url, http))
    asked: list[str] = []

    @agent.tool_plain
    def weather(city: str) -> str:
        """The weather in a city."""
        asked.append(city)
        return "-3"

    assert (await agent.run("How is the weather?")).output == "It is cold."
    assert (asked, len(recorded.bodies)) == (["Oslo"], 2)


@pytest.mark.parametrize("model", MODELS)
async def test_a_stream(model: Any, url: str) -> None:
    agent = Agent(model(url, None), model_settings={"max_tokens": 16})
    async with agent.run_stream("Say hello.") as stream:
        assert await stream.get_output()
