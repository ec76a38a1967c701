"""openai-agents: tools, typed results and streams, by chat and by the Responses API; a model's name with a slash."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import agents
import httpx
import pytest
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, RunConfig, Runner, function_tool
from agents.models.multi_provider import MultiProvider
from conftest import CHAT, Scripted, called
from openai import AsyncOpenAI
from pydantic import BaseModel

agents.set_tracing_disabled(True)

Made = Callable[..., tuple[httpx.AsyncClient, Scripted]]
KINDS = [OpenAIChatCompletionsModel, OpenAIResponsesModel]


class Place(BaseModel):
    city: str
    size: int


@function_tool
def weather(city: str) -> str:
    """The weather in a city."""
    return f"-3 in {city}"


def model_of(kind: Any, url: str, http: httpx.AsyncClient | None = None) -> Any:
    return kind(model=CHAT, openai_client=AsyncOpenAI(base_url=f"{url}/v1", api_key="none", http_client=http))


@pytest.mark.parametrize("kind", KINDS)
async def test_a_tool_is_called_and_its_result_answered(kind: Any, url: str, scripted: Made) -> None:
    http, recorded = scripted(called("weather", city="Oslo"), "It is cold.")
    agent = Agent(name="a", instructions="Be brief.", model=model_of(kind, url, http), tools=[weather])
    result = await Runner.run(agent, "How is the weather?")
    assert (result.final_output, len(recorded.bodies)) == ("It is cold.", 2)
    assert "-3 in Oslo" in str(recorded.bodies[1])


@pytest.mark.parametrize("kind", KINDS)
async def test_a_typed_result(kind: Any, url: str) -> None:
    settings = ModelSettings(max_tokens=200)
    agent = Agent(name="a", model=model_of(kind, url), output_type=Place, model_settings=settings)
    assert isinstance((await Runner.run(agent, "Name a place.")).final_output, Place)


@pytest.mark.parametrize("kind", KINDS)
async def test_a_stream(kind: Any, url: str, scripted: Made) -> None:
    http, _ = scripted("<think>hm</think>Hello there.")
    agent = Agent(name="a", model=model_of(kind, url, http))
    result = Runner.run_streamed(agent, "Say hello.")
    events = [event async for event in result.stream_events()]
    assert events
    assert result.final_output == "Hello there."


async def test_a_name_with_a_slash_needs_a_provider_that_takes_it_for_a_name(url: str) -> None:
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none")
    provider = MultiProvider(openai_client=client, unknown_prefix_mode="model_id")
    agent = Agent(name="a", model=CHAT, model_settings=ModelSettings(max_tokens=16))
    result = await Runner.run(agent, "Say hello.", run_config=RunConfig(model_provider=provider))
    assert result.final_output
