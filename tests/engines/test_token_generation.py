"""Answers of `/inference/v1/generate` are what vLLM's own types of that route take, with no key more or less."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import TypeAdapter

from tests.support.frontend.fakes import FakeIngress, frontend, post
from tests.unit.frontend.openai.test_token_generation import URL, body, two_rows

pytestmark = [pytest.mark.engine, pytest.mark.filterwarnings("default")]  # vLLM and torch warn about themselves


@pytest.mark.parametrize("mode", ["tokens", "text"])
@pytest.mark.parametrize("logprobs", [None, 0, 3])
async def test_answers_and_events_have_vllms_shape(mode: str, logprobs: int | None) -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponse, GenerateStreamResponse

    asked = body({"logprobs": logprobs}, output_mode=mode, return_token_ids=True)
    answer = (await post(frontend(FakeIngress(two_rows)).app, asked, URL)).json()
    known: Any = TypeAdapter(GenerateResponse).validate_python(answer, strict=True)
    assert known.model_dump().keys() == answer.keys()
    assert known.model_dump()["choices"][0].keys() == answer["choices"][0].keys()
    streamed = asked | {"stream": True, "stream_options": {"include_usage": True}}
    for event in (await post(frontend(FakeIngress(two_rows)).app, streamed, URL)).events()[:-1]:
        TypeAdapter(GenerateStreamResponse).validate_python(event, strict=True)
