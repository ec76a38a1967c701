"""The answers of the Responses API: the order of events, the same content streamed and whole, ends and failures."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from openai.types.responses import Response
from pydantic import TypeAdapter

from headrace.broker.errors import JobFailed
from headrace.broker.messages.frames import Part, Row, TokenLogprob
from headrace.frontend.generation.endpoint import Incomplete
from headrace.frontend.generation.sse import Head, LogprobWriter, UsageCounter
from headrace.frontend.responses.answer import Sampled, opened
from headrace.frontend.responses.schema import ResponsesRequest
from headrace.frontend.responses.writers import ResponseEvents, ResponseProgress
from tests.support.frontend.answer_parts import call, content, parts_row, said, say_parts, thought
from tests.support.frontend.fakes import end, row
from tests.support.frontend.responses_client import Client, events_of
from tests.support.frontend.responses_machine import Machine, check_shape

TURN = (
    [thought("Let me ")],
    [thought("see.")],
    [content("Hello")],
    [content(" you")],
    [call(0, '{"a":', name="f"), call(0, "1}")],
)
SCHEMA_FORMAT = {"type": "json_schema", "name": "n", "description": "d", "schema": {"type": "object"}, "strict": True}
TOOLS = [{"type": "function", "name": "f", "parameters": {"type": "object"}}]


def played(events: list[dict[str, Any]]) -> Machine:
    machine = Machine()
    for event in events:
        machine.take(event)
    return machine


def writer_of(tops: int | None = None) -> ResponseEvents:
    head = Head("resp_aa", 1, "m", "f")
    request = ResponsesRequest(model="m", input="x")
    response = opened(request, head, Sampled(temperature=1.0, top_p=1.0), store=False)
    logprobs = LogprobWriter(tops, choices=1) if tops is not None else None
    return ResponseEvents(ResponseProgress(response, "aa", UsageCounter([3], 1), logprobs), None)


def machine_of(writer: ResponseEvents, rows: list[Row]) -> Machine:
    out = b"".join(writer.events([one]) for one in rows) + writer.closing()
    machine = Machine()
    for block in out.decode().split("\n\n")[:-1]:
        machine.take(json.loads(block.split("\n", 1)[1].removeprefix("data: ")))
    return machine


@settings(deadline=None, max_examples=50)
@given(said())
def test_any_sequence_of_parts_gives_well_formed_events(rows: list[list[Part]]) -> None:
    machine = machine_of(writer_of(), [*(parts_row(parts) for parts in rows), parts_row([], fin=end("stop"), ids=0)])
    assert machine.ended
    assert machine.final["output"] == machine.items
    assert machine.final["status"] == "completed"


async def test_a_turn_streams_every_kind_of_item_and_ends_with_all_of_them() -> None:
    machine = played(await Client(say_parts(*TURN, reason="tool_calls", reasoning_tokens=2)).stream())
    assert machine.ended
    thinking, message, tool = machine.final["output"]
    assert thinking["content"] == [{"type": "reasoning_text", "text": "Let me see."}]
    assert message["content"][0]["text"] == "Hello you"
    assert (tool["name"], tool["call_id"], tool["arguments"]) == ("f", "call_0", '{"a":1}')
    assert machine.final["output"] == machine.items
    assert machine.final["usage"]["output_tokens"] == 5


async def test_whole_and_streamed_say_the_same() -> None:
    client = Client(say_parts(*TURN, reason="tool_calls"))
    whole = (await client.create()).json()
    TypeAdapter(Response).validate_python(whole)
    streamed = (await client.stream())[-1]["response"]

    def plain(response: dict[str, Any]) -> Any:
        ids = ("id", "created_at", "completed_at")
        output = [{k: v for k, v in item.items() if k != "id"} for item in response["output"]]
        return {k: v for k, v in response.items() if k not in ids} | {"output": output}

    assert plain(whole) == plain(streamed)


async def test_an_answer_cut_by_the_limit_is_incomplete() -> None:
    client = Client(say_parts([content("Hel")], [content("lo")], reason="length"))
    machine = played(await client.stream(max_output_tokens=2))
    assert machine.final["status"] == "incomplete"
    assert machine.final["incomplete_details"] == {"reason": "max_output_tokens"}
    assert machine.items[0]["status"] == "incomplete"
    assert client.ingress.jobs[0].max_tokens == 2
    whole = (await client.create(max_output_tokens=2)).json()
    assert (whole["status"], whole["output"][0]["status"]) == ("incomplete", "incomplete")


async def test_more_tokens_than_fit_are_what_fits() -> None:
    client = Client()
    assert (await client.create(max_output_tokens=100_000)).status == 200
    job = client.ingress.jobs[0]
    assert job.max_tokens == job.card.context_length - job.prompt_tokens == job.generation.sampling.max_tokens


async def test_a_stream_that_breaks_ends_with_a_failed_response() -> None:
    def broken(job: Any) -> Any:
        yield [parts_row([content("Hel")])]
        yield JobFailed("the engine died")

    events = await Client(broken).stream()
    assert events[-1]["type"] == "response.failed"
    assert events[-1]["response"]["error"]["code"] == "server_error"
    assert "engine died" in events[-1]["response"]["error"]["message"]
    assert played(events).ended


async def test_a_parser_that_goes_back_fails_the_response_without_a_hole_in_the_numbers() -> None:
    events = await Client(say_parts([call(0, "{", name="a"), call(1, "{}", name="b")], [call(0, "}")])).stream()
    assert events[-1]["type"] == "response.failed"
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


def test_a_stream_that_fails_before_the_first_event_is_a_plain_error() -> None:
    event = json.loads(writer_of().failure(Incomplete()).split(b"\n")[1].removeprefix(b"data: "))
    check_shape(event)
    assert event["type"] == "error"


async def test_an_error_before_the_first_token_has_its_status() -> None:
    client = Client()
    client.ingress.refusal = JobFailed("no")
    answer = await client.create(stream=True)
    assert (answer.status, answer.error["code"]) == (502, "engine_error")


def test_log_probabilities_go_with_the_text_they_are_of() -> None:
    def lp(text: str) -> TokenLogprob:
        return TokenLogprob(1, text.encode(), -0.5, [(1, text.encode(), -0.5), (2, b"x", -1.5)])

    rows = [
        Row("job", 1, 7, 0, 0, [1, 2], ["", [thought("hm")]], [lp("h"), lp("m")]),
        Row("job", 1, 7, 0, 2, [3, 4], ["", [content("ab")]], [lp("a"), lp("b")]),
        Row("job", 1, 7, 0, 4, [5], [[content("c")]], [lp("c")], end("stop")),
    ]
    machine = machine_of(writer_of(1), rows)
    part = machine.final["output"][1]["content"][0]
    assert [entry["token"] for entry in part["logprobs"]] == ["a", "b", "c"]
    assert [len(entry["top_logprobs"]) for entry in part["logprobs"]] == [1, 1, 1]


async def test_log_probabilities_are_asked_for_by_include() -> None:
    client = Client()
    await client.create(include=["message.output_text.logprobs"], top_logprobs=3)
    await client.create()
    assert [job.generation.logprobs for job in client.ingress.jobs] == [3, None]


async def test_plain_text_streams_one_event_per_row() -> None:
    def script(job: Any) -> Any:
        yield [row("Hel"), row("lo")]
        yield [row(" you", fin=end())]

    events = await Client(script).stream()
    assert [e["delta"] for e in events if e["type"] == "response.output_text.delta"] == ["Hel", "lo", " you"]
    assert "[DONE]" not in str(events)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_answer_repeats_what_was_asked_for(stream: bool) -> None:
    asked: dict[str, Any] = {
        "instructions": "Be brief.",
        "metadata": {"a": "b"},
        "temperature": 0.5,
        "top_p": 0.5,
        "user": "me",
        "safety_identifier": "s",
        "prompt_cache_key": "k",
        "parallel_tool_calls": False,
        "truncation": "auto",
        "text": {"format": SCHEMA_FORMAT, "verbosity": "low"},
        "service_tier": "priority",
        "max_tool_calls": 3,
    }
    call = await Client().create(stream=stream, **asked)
    answer = events_of(call)[-1]["response"] if stream else call.json()
    assert {name: answer[name] for name in asked} == asked
    assert answer["reasoning"] == {"effort": None, "summary": None, "generate_summary": None}
