"""Models as Anthropic's clients read them, page by page."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import TypeAdapter
from structlog.testing import capture_logs

from headrace.broker.errors import JobFailed, NoWorker
from headrace.broker.messages.frames import Finish, Part, Row
from headrace.broker.models.cards import MediaSlot
from headrace.frontend.anthropic.api import MessageEvents, model_entry, model_page
from headrace.frontend.anthropic.schema import AnthropicForm
from headrace.frontend.generation.sse import Head, UsageCounter
from tests.support.frontend.answer_parts import call, content, parts_row, said, say_parts, thought
from tests.support.frontend.anthropic_client import Client, events_of
from tests.support.frontend.anthropic_machine import Machine
from tests.support.frontend.fakes import CARD, FILES, MODEL, Call, FakeIngress, FakeServed, end, frontend, row, say

HEADERS = {"anthropic-version": "2023-06-01"}
SERVED = [FakeServed(msgspec.structs.replace(CARD, model=f"m{i}"), FILES) for i in range(7)]


async def ask(path: str, query: str = "") -> Call:
    call = Call(frontend(FakeIngress()).app, path, method="GET", headers=HEADERS)
    call.scope["query_string"] = query.encode()
    return await call.run()


@pytest.mark.parametrize("path", ["/v1/models", "/v1/models/"])
async def test_the_listing_has_anthropics_keys(path: str) -> None:
    answer = (await ask(path)).json()
    assert (answer["has_more"], answer["first_id"], answer["last_id"]) == (False, MODEL, "tiny")
    entry, alias = answer["data"]
    assert alias == entry | {"id": "tiny", "display_name": "tiny"}
    # what the client makes of it: tests/integration/frontend/test_anthropic_client.py; importing that takes two seconds
    assert (entry["type"], entry["id"], entry["created_at"][:5], entry["max_input_tokens"]) == ("model", MODEL, "2023-", 512)


async def test_a_model_with_a_slash_in_its_name_is_found() -> None:
    answer = (await ask(f"/v1/models/{MODEL}")).json()
    assert (answer["type"], answer["id"]) == ("model", MODEL)


async def test_an_unknown_model_is_an_error_in_anthropics_shape() -> None:
    call = await ask("/v1/models/org/other")
    assert (call.status, call.json()["type"], call.error["type"]) == (404, "error", "not_found_error")


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "limit=-1", "after_id=nope", "before_id=nope"])
async def test_a_page_that_does_not_exist_is_a_400_that_names_the_parameter(query: str) -> None:
    call = await ask("/v1/models", query)
    assert (call.status, call.error["type"]) == (400, "invalid_request_error")
    assert query.partition("=")[0] in call.error["message"]


@given(st.integers(1, 9))
def test_all_pages_together_are_the_listing_in_both_directions(limit: int) -> None:
    for cursor, edge in (("after_id", "last_id"), ("before_id", "first_id")):
        query, seen, more = {"limit": str(limit)}, list[str](), True
        if cursor == "before_id":
            query[cursor] = "m6"
        while more:
            page = model_page(SERVED, query)
            ids = [entry.id for entry in page.data]
            assert 1 <= len(ids) <= limit
            seen = [*seen, *ids] if cursor == "after_id" else [*ids, *seen]
            more = page.has_more
            query[cursor] = str(getattr(page, edge))
        assert seen == [served.card.model for served in SERVED][: None if cursor == "after_id" else 6]


def test_capabilities_come_from_the_card() -> None:
    plain = model_entry(FakeServed(CARD, FILES)).capabilities
    assert (plain.image_input.supported, plain.thinking.supported, plain.structured_outputs.supported) == (False, False, True)
    card = msgspec.structs.replace(CARD, reasoning_parser="think", media={"image": MediaSlot("<i>", 5)})
    rich = model_entry(FakeServed(card, FILES)).capabilities
    assert (rich.image_input.supported, rich.thinking.supported) == (True, True)


TURN = (
    [thought("Let me ")],
    [thought("see.")],
    [content("Hello")],
    [content(" you")],
    [call(0, '{"a":', name="f"), call(0, "1}")],
)


def played(events: list[dict[str, Any]]) -> Machine:
    machine = Machine()
    for event in events:
        machine.take(event)
    return machine


def machine_of(rows: list[Row]) -> Machine:
    writer = MessageEvents(Head("msg_aa", 1, "m", "f"), UsageCounter([3], 1), AnthropicForm())
    return played(events_of(b"".join(writer.events([one]) for one in rows) + writer.closing()))


@pytest.mark.deep
@settings(deadline=None, max_examples=50)
@given(said())
def test_any_sequence_of_parts_gives_well_formed_events(rows: list[list[Part]]) -> None:
    machine = machine_of([*(parts_row(parts) for parts in rows), parts_row([], fin=end("stop"), ids=0)])
    assert machine.state == "ended"
    assert machine.blocks


async def test_a_turn_streams_every_kind_of_block() -> None:
    client = Client(say_parts(*TURN, reason="tool_calls", cached_tokens=16))
    events = await client.stream()
    machine = played(events)
    assert machine.state == "ended"
    assert [event["type"] for event in events[:2]] == ["message_start", "ping"]
    assert [block["type"] for block in machine.blocks] == ["thinking", "text", "tool_use"]
    assert machine.texts == ["Let me see.", "Hello you", '{"a":1}']
    assert machine.delta["delta"] == {"stop_reason": "tool_use", "stop_sequence": None}


async def test_whole_and_streamed_say_the_same() -> None:
    from anthropic import types

    client = Client(say_parts(*TURN, reason="tool_calls", cached_tokens=16))
    whole = (await client.create()).json()
    TypeAdapter(types.Message).validate_python(whole)
    machine = played(await client.stream())

    def unsigned(blocks: list[dict[str, Any]]) -> Any:
        return [{k: v for k, v in block.items() if k != "signature"} for block in blocks]

    assert unsigned(machine.content()) == unsigned(whole["content"])
    assert machine.delta["usage"] == whole["usage"]
    assert machine.delta["delta"]["stop_reason"] == whole["stop_reason"]


async def test_cached_tokens_are_not_input_tokens() -> None:
    client = Client(say("x", cached_tokens=16))
    usage = (await client.create()).json()["usage"]
    assert usage["cache_read_input_tokens"] == 16
    assert usage["input_tokens"] + 16 == client.ingress.jobs[0].prompt_tokens
    start = played(await client.stream()).start["usage"]
    assert start["input_tokens"] == client.ingress.jobs[0].prompt_tokens  # nobody knows at that point what was cached


ENDINGS: list[tuple[list[Part], dict[str, Any], tuple[str, str | None]]] = [
    ([content("x")], {"reason": "stop"}, ("end_turn", None)),
    ([content("x")], {"reason": "stop", "stop": 256}, ("end_turn", None)),
    ([content("x")], {"reason": "stop", "stop": "END"}, ("stop_sequence", "END")),
    ([content("x")], {"reason": "length"}, ("max_tokens", None)),
    ([call(0, "{", name="f")], {"reason": "length"}, ("max_tokens", None)),
    ([content("x")], {"reason": "content_filter"}, ("refusal", None)),
    ([call(0, "{}", name="f")], {"reason": "tool_calls"}, ("tool_use", None)),
    ([call(0, "{}", name="f")], {"reason": "stop"}, ("tool_use", None)),  # a named tool
    ([call(0, "{}", name="f")], {"reason": "stop", "stop": "END"}, ("tool_use", None)),
    ([call(0, '{"a', name="f")], {"reason": "stop", "stop": "END"}, ("stop_sequence", "END")),  # cut: it must not run
]


@pytest.mark.parametrize(("parts", "finish", "expected"), ENDINGS)
async def test_why_it_stopped(parts: list[Part], finish: dict[str, Any], expected: tuple[str, str | None]) -> None:
    client = Client(say_parts(parts, **finish))
    whole = (await client.create()).json()
    assert (whole["stop_reason"], whole["stop_sequence"]) == expected
    assert played(await client.stream()).delta["delta"] == dict(zip(("stop_reason", "stop_sequence"), expected, strict=True))


async def test_an_answer_that_ends_where_the_context_does_says_so() -> None:
    client = Client(say("x", reason="length"))
    whole = (await client.create(max_tokens=100_000)).json()
    assert whole["stop_reason"] == "model_context_window_exceeded"
    job = client.ingress.jobs[0]
    assert job.max_tokens == job.card.context_length - job.prompt_tokens == job.generation.sampling.max_tokens


async def test_arguments_that_are_no_object_are_shown_as_they_are() -> None:
    with capture_logs() as logs:
        whole = (await Client(say_parts([call(0, '{"a', name="f")], reason="length")).create()).json()
    assert whole["content"][0]["input"] == {"unparsed_arguments": '{"a'}
    assert "tool_input.not_an_object" in [line["event"] for line in logs]


async def test_a_call_without_arguments_has_an_empty_input() -> None:
    client = Client(say_parts([call(0, name="f")], reason="tool_calls"))
    assert (await client.create()).json()["content"][0]["input"] == {}
    assert played(await client.stream()).content()[0]["input"] == {}


async def test_a_stream_that_breaks_ends_with_an_error_and_without_a_stop() -> None:
    def broken(job: Any) -> Any:
        yield [row("Hel")]
        yield JobFailed("the engine died")

    events = await Client(broken).stream()
    assert events[-1] == {"type": "error", "error": {"type": "api_error", "message": "the engine died"}}
    assert "message_stop" not in [event["type"] for event in events]


async def test_errors_have_anthropics_shape_type_and_status() -> None:
    client = Client()
    missing = await client.create(model="nobody")
    assert (missing.status, missing.json()["error"]["type"]) == (404, "not_found_error")
    assert missing.json()["type"] == "error"
    client.ingress.refusal = NoWorker("tiny")
    busy = await client.create()
    assert (busy.status, busy.json()["error"]["type"]) == (529, "overloaded_error")
    assert "retry-after" in busy.headers
    assert busy.headers["request-id"] == busy.headers["x-request-id"]
    client.frontend.lifecycle.draining = True
    draining = await client.create()
    assert (draining.status, draining.json()["error"]["type"]) == (529, "overloaded_error")


async def test_a_prompt_that_is_too_long_is_told_in_the_words_clients_look_for() -> None:
    answer = await Client().create(messages=[{"role": "user", "content": "x" * 1000}])
    assert (answer.status, answer.json()["error"]["type"]) == (400, "invalid_request_error")
    assert answer.json()["error"]["message"].startswith("prompt is too long: 10")
    assert answer.json()["error"]["message"].endswith("tokens > 512 maximum")


def test_the_end_may_bring_text_that_was_held_back() -> None:
    machine = machine_of([parts_row([content("a")]), parts_row([], fin=Finish(reason="stop", tail=[content("b")]), ids=0)])
    assert machine.texts == ["ab"]
