"""Calls that the model must make, through a real vLLM: the grammar forces the form, the parser takes it apart."""

from __future__ import annotations

import asyncio
import re
from typing import Any

import msgspec
import pytest
import pytest_asyncio

from headrace.broker.jobs import OutputParts
from headrace.broker.messages.requests import Generation, Parsing, Sampling
from headrace.workers.detokenize import TextPipeline, TokenTable
from headrace.workers.vllm.parsing import VllmParsers
from tests.engines.conftest import Bench
from tests.support.parsing_pieces import said

pytestmark = [
    pytest.mark.engine,
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.timeout(400),
    pytest.mark.filterwarnings("default"),  # vLLM and torch warn about themselves
]

PARAMETERS = {
    "type": "object",
    "properties": {"city": {"type": "string", "enum": ["Paris"]}},
    "required": ["city"],
    "additionalProperties": False,
}
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {"name": "get_weather", "description": "What the weather is like", "parameters": PARAMETERS, "strict": True},
}
NAMED = {"type": "function", "function": {"name": "get_weather"}}


async def answer(bench: Bench, prompt: list[int], parsing: Parsing, *, tool: str | None) -> OutputParts:
    assert bench.info is not None
    llm = bench.engine.llm
    of = VllmParsers(llm.renderer.tokenizer, llm.model_config, tool=tool, reasoning=None)
    plan = of.plan(parsing, Generation(token_ids=b""), prompt)
    requirements = plan.requirements
    ids = await bench.ids(
        prompt,
        Sampling(temperature=0.0, max_tokens=64),
        guided=requirements.guided,
        reasoning_ended=requirements.reasoning_ended,
        reasoning_kwargs=requirements.reasoning_kwargs,
    )
    table = TokenTable.load(bench.info.tokenizer_dir)
    text = TextPipeline(table, prompt_ids=prompt, skip_special_tokens=requirements.skip_special_tokens)
    parser = plan.parser("request", 0)
    parts = [part for token in ids[:-1] for part in parser.push(token, text.push(token))]
    return said(parts + parser.finish(ids[-1], text.finish()))


CASES = [(tool, choice, whole) for tool in (None, "hermes") for choice in ("required", "named") for whole in (False, True)]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def answers(bench: Bench, prompts: list[list[int]]) -> dict[tuple[str | None, str, bool], OutputParts | BaseException]:
    """What is answered in each case, all at once."""
    requirements = [
        answer(
            bench,
            prompts[0],
            Parsing(tools=[WEATHER], choice=NAMED if choice == "named" else choice, parallel=False, whole=whole),
            tool=tool,
        )
        for tool, choice, whole in CASES
    ]
    return dict(zip(CASES, await asyncio.gather(*requirements, return_exceptions=True), strict=True))


@pytest.mark.parametrize("case", CASES, ids=str)
async def test_a_forced_call_is_made(
    answers: dict[tuple[str | None, str, bool], OutputParts | BaseException], case: tuple[str | None, str, bool]
) -> None:
    made = answers[case]
    if isinstance(made, BaseException):
        raise made
    assert [call.name for call in made.calls] == ["get_weather"]
    assert msgspec.json.decode(made.calls[0].arguments) == {"city": "Paris"}
    assert made.content.strip() == ""


@pytest.mark.parametrize("whole", [False, True], ids=["streamed", "whole"])
async def test_what_a_model_was_made_to_think_is_its_reasoning(bench: Bench, prompts: list[list[int]], whole: bool) -> None:
    assert bench.info is not None
    llm = bench.engine.llm
    of = VllmParsers(llm.renderer.tokenizer, llm.model_config, tool=None, reasoning="qwen3")
    plan = of.plan(Parsing(whole=whole), Generation(token_ids=b""), prompts[0])
    thinks = {"regex": r"<think>[a-z ]{8,20}</think>[A-Z][a-z]{3,8}\."}
    ids = await bench.ids(prompts[0], Sampling(temperature=0.0, max_tokens=64), guided=thinks)
    table = TokenTable.load(bench.info.tokenizer_dir)
    text = TextPipeline(table, prompt_ids=prompts[0], skip_special_tokens=plan.requirements.skip_special_tokens)
    parser = plan.parser("request", 0)
    written = ""
    parts = []
    for token in ids[:-1]:
        piece = text.push(token)
        written += piece or ""
        parts += parser.push(token, piece)
    made = said(parts + parser.finish(ids[-1], text.finish()))
    matched = re.fullmatch(r"<think>([a-z ]{8,20})</think>([A-Z][a-z]{3,8}\.)", written.strip())
    assert matched, written
    assert (made.reasoning.strip(), made.content.strip()) == (matched[1].strip(), matched[2])
