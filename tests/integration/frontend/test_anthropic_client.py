"""The `anthropic` client: real server, simulated models whose answers are taken apart, and a long session of an agent."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from tests.support.frontend.anthropic_machine import Machine
from tests.support.local_deployment import Serving, serving, sim

if TYPE_CHECKING:  # importing it takes two seconds, also of those who only collect these tests
    from anthropic import AsyncAnthropic

pytestmark = pytest.mark.asyncio(loop_scope="module")

MODEL = "acme/agent"
HI: list[Any] = [{"role": "user", "content": "What is the weather in Oslo?"}]
WEATHER: Any = {
    "name": "weather",
    "description": "The weather in a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    },
}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
THOUGHT = "<think>The user wants the weather.</think>"


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer) -> AsyncIterator[Serving]:
    import anthropic  # noqa: F401 - before anything has a lease to keep on this event loop

    model = sim(MODEL, tool_parser="hermes", reasoning_parser="think", args={"context_length": 32768})
    async with serving(nats_server, Subjects(f"anth{os.getpid()}"), model) as running:
        yield running


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def client(deployment: Serving) -> AsyncIterator[AsyncAnthropic]:
    from anthropic import AsyncAnthropic

    async with AsyncAnthropic(base_url=deployment.url, api_key="none", max_retries=0) as made:
        yield made


def asked(answer: str | None = None, **options: Any) -> dict[str, Any]:
    extra = {**options.pop("extra_body", {}), **({"vllm_xargs": {"sim_answer": answer}} if answer is not None else {})}
    return {"model": MODEL, "messages": HI, "max_tokens": 400, **options, "extra_body": extra}


async def create(client: AsyncAnthropic, answer: str | None = None, **options: Any) -> Any:
    return await client.messages.create(**asked(answer, **options))


async def test_a_message_has_every_field_the_client_knows(client: AsyncAnthropic) -> None:
    message = await create(client, "Cold.", system="Be brief.", metadata={"user_id": "u"})
    assert message.id.startswith("msg_")
    assert (message.type, message.role, message.model) == ("message", "assistant", MODEL)
    assert [(block.type, block.text) for block in message.content] == [("text", "Cold.")]
    assert (message.stop_reason, message.stop_sequence) == ("end_turn", None)
    assert message.usage.input_tokens + message.usage.cache_read_input_tokens > 0
    assert message.usage.output_tokens > 0


async def test_events_come_in_the_specified_order(client: AsyncAnthropic) -> None:
    machine = Machine()
    stream = await create(client, f"{THOUGHT}Let me look.\n{CALL}", tools=[WEATHER], stream=True)
    async for event in stream:
        machine.take(event.to_dict())
    assert machine.state == "ended"
    assert [block["type"] for block in machine.blocks] == ["thinking", "text", "tool_use"]
    assert json.loads(machine.texts[2]) == {"city": "Oslo"}
    assert machine.delta["delta"]["stop_reason"] == "tool_use"


async def test_the_stream_helper_adds_it_up(client: AsyncAnthropic) -> None:
    answer = f"{THOUGHT}Let me look.\n{CALL}"
    async with client.messages.stream(**asked(answer, tools=[WEATHER])) as stream:
        text = "".join([piece async for piece in stream.text_stream])
        final: Any = await stream.get_final_message()
    whole = await create(client, answer, tools=[WEATHER])
    thinking, said, call = final.content
    assert (thinking.type, said.type, call.type) == ("thinking", "text", "tool_use")
    assert thinking.thinking == "The user wants the weather."
    assert thinking.signature
    assert text.strip() == "Let me look."
    assert (call.type, call.name, call.input) == ("tool_use", "weather", {"city": "Oslo"})
    assert [block.type for block in whole.content] == ["thinking", "text", "tool_use"]
    assert whole.content[2].input == call.input
    assert final.stop_reason == whole.stop_reason == "tool_use"
    assert final.usage.output_tokens == whole.usage.output_tokens


async def test_a_tool_is_used_and_its_result_answered(client: AsyncAnthropic) -> None:
    first = await create(client, f"{THOUGHT}{CALL}", tools=[WEATHER])
    call = first.content[-1]
    result = {"type": "tool_result", "tool_use_id": call.id, "content": [{"type": "text", "text": "-3"}]}
    turns = [*HI, {"role": "assistant", "content": [b.to_dict() for b in first.content]}, {"role": "user", "content": [result]}]
    second = await create(client, "Minus three.", tools=[WEATHER], messages=turns)
    assert second.content[0].text == "Minus three."


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
async def test_a_tool_that_must_be_used_is_used(client: AsyncAnthropic, choice: Any) -> None:
    message = await create(client, tools=[WEATHER], tool_choice={**choice, "disable_parallel_tool_use": True})
    calls = [block for block in message.content if block.type == "tool_use"]
    assert [call.name for call in calls] == ["weather"]
    assert list(calls[0].input) == ["city"]
    assert message.stop_reason == "tool_use"


async def test_tools_that_must_not_be_used_are_text(client: AsyncAnthropic) -> None:
    message = await create(client, "Plain.", tools=[WEATHER], tool_choice={"type": "none"})
    assert [block.type for block in message.content] == ["text"]


async def test_stop_sequences_and_limits_say_that_they_did_it(client: AsyncAnthropic) -> None:
    stopped = await create(client, "One. STOP Two.", stop_sequences=["STOP"])
    assert (stopped.stop_reason, stopped.stop_sequence) == ("stop_sequence", "STOP")
    assert stopped.content[0].text == "One. "
    cut = await create(client, "One two three four.", max_tokens=3)
    assert (cut.stop_reason, cut.usage.output_tokens) == ("max_tokens", 3)
    async with client.messages.stream(**asked("Short.", max_tokens=1_000_000)) as stream:  # more than fits is what fits
        assert (await stream.get_final_message()).stop_reason == "end_turn"


async def test_an_output_format_is_kept_to(client: AsyncAnthropic) -> None:
    config: Any = {"format": {"type": "json_schema", "schema": WEATHER["input_schema"]}}
    message = await create(client, output_config=config)
    assert list(json.loads(message.content[-1].text)) == ["city"]


async def test_thinking_can_be_asked_for(client: AsyncAnthropic) -> None:
    message = await create(client, f"{THOUGHT}Cold.", max_tokens=2000, thinking={"type": "enabled", "budget_tokens": 1024})
    assert [block.type for block in message.content] == ["thinking", "text"]


async def test_options_that_newer_clients_leave_out_are_taken(client: AsyncAnthropic) -> None:
    message = await create(client, "Yes.", extra_body={"temperature": 0, "top_k": 1, "top_p": 0.9}, service_tier="auto")
    assert message.content[0].text == "Yes."


async def test_what_goes_in_is_counted(client: AsyncAnthropic) -> None:
    system: Any = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    made = await create(client, "x", system=system, tools=[WEATHER])
    counted = await client.messages.count_tokens(model=MODEL, messages=HI, system=system, tools=[WEATHER])
    assert counted.input_tokens == made.usage.input_tokens + made.usage.cache_read_input_tokens


async def test_errors_are_the_ones_the_client_knows(client: AsyncAnthropic) -> None:
    import anthropic

    with pytest.raises(anthropic.NotFoundError) as missing:
        await create(client, "x", model="nobody")
    body: Any = missing.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")
    assert missing.value.request_id
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        await create(client, messages=[{"role": "user", "content": "word " * 40_000}])
    with pytest.raises(anthropic.BadRequestError, match="web_surf"):
        await create(client, tools=[{"type": "web_surf_20250305", "name": "web_surf"}])


@pytest.mark.slow
async def test_models_are_listed_and_described_in_the_clients_shape(client: AsyncAnthropic) -> None:
    import anthropic

    assert [model.id async for model in client.models.list(limit=1)] == [MODEL]
    model = await client.models.retrieve(MODEL)
    assert (model.type, model.display_name, model.max_input_tokens) == ("model", MODEL, 32768)
    for missing in (client.models.retrieve("acme/nope"), client.messages.batches.retrieve("b")):
        with pytest.raises(anthropic.NotFoundError) as caught:
            await missing
        assert caught.value.body["error"]["type"] == "not_found_error"  # type: ignore[index]


async def test_a_long_session_of_an_agent_reuses_its_prefix(client: AsyncAnthropic) -> None:
    """Thirty turns with tool use, as Claude Code plays them: several system blocks, the first of which is never the same."""
    rules = [{"type": "text", "text": f"Rule {i}: be careful with the files of the user. " * 3} for i in range(10)]
    turns: list[Any] = [{"role": "user", "content": [{"type": "text", "text": "Fix the tests."}]}]
    cached, totals = [], []
    for turn in range(30):
        billing = {"type": "text", "text": f"x-anthropic-billing-header: cc_version=2.1.{turn}; cch={turn * 7919:05x};"}
        answer = f"<think>Step {turn}.</think>I look at file {turn}.\n{CALL.replace('Oslo', f'file {turn}')}"
        async with client.messages.stream(
            **asked(
                answer,
                messages=turns,
                tools=[WEATHER],
                system=[billing, *rules],
                metadata={"user_id": "user_1_account_2_session_3"},
            )
        ) as stream:
            message: Any = await stream.get_final_message()
        assert message.stop_reason == "tool_use"
        usage = message.usage
        cached.append(usage.cache_read_input_tokens or 0)
        totals.append(usage.input_tokens + cached[-1])
        turns.append({"role": "assistant", "content": [block.to_dict() for block in message.content]})
        calls = [block for block in message.content if block.type == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": c.id, "content": f"Contents of file {turn}."} for c in calls]
        turns.append({"role": "user", "content": results})
    assert totals == sorted(set(totals))
    assert cached[1:] == sorted(set(cached[1:]))  # every turn finds more than the one before
    for turn in range(1, 30):
        assert cached[turn] >= totals[turn - 1] - 16  # all that the turn before sent, but for a block or two
