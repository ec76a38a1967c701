"""LiteLLM by the providers for vLLM, Anthropic and Ollama."""

from __future__ import annotations

from typing import Any

import litellm
import pytest
from conftest import CHAT, called

HI = [{"role": "user", "content": "Say hello."}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather in a city",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def served(url: str, provider: str) -> dict[str, Any]:
    base = {"hosted_vllm": f"{url}/v1", "openai": f"{url}/v1"}.get(provider, url)
    return {"model": f"{provider}/{CHAT}", "api_base": base, "api_key": "none", "max_tokens": 32, "num_retries": 0}


@pytest.mark.parametrize("provider", ["hosted_vllm", "openai", "anthropic", "ollama_chat", "ollama"])
def test_a_chat_whole_and_streamed(provider: str, url: str) -> None:
    answer = litellm.completion(messages=HI, **served(url, provider))
    assert answer.choices[0].message.content
    assert answer.usage.completion_tokens > 0
    chunks = litellm.completion(messages=HI, stream=True, **served(url, provider))
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks)


@pytest.mark.parametrize("provider", ["hosted_vllm", "anthropic"])
def test_a_tool_that_must_be_called(provider: str, url: str) -> None:
    answer = litellm.completion(messages=HI, tools=[WEATHER], tool_choice="required", **served(url, provider))
    assert answer.choices[0].message.tool_calls[0].function.name == "weather"


def test_a_tool_called_by_choice(url: str) -> None:
    extra = {"vllm_xargs": {"sim_answer": called("weather", city="Oslo")}}
    answer = litellm.completion(messages=HI, tools=[WEATHER], extra_body=extra, **served(url, "hosted_vllm"))
    assert answer.choices[0].message.tool_calls[0].function.arguments == '{"city": "Oslo"}'


def test_reasoning_comes_with_its_own_name(url: str) -> None:
    extra = {"vllm_xargs": {"sim_answer": "<think>hm</think>yes"}}
    message = litellm.completion(messages=HI, extra_body=extra, **served(url, "hosted_vllm")).choices[0].message
    assert (message.reasoning_content, message.content) == ("hm", "yes")
