"""What a streamed answer looks like, when its status is sent, and what happens when the reader is slow or leaves."""

from __future__ import annotations

import asyncio
from typing import Any

import httpx
import openai
import pytest
from openai.types.chat import ChatCompletionChunk

from headrace.broker.messages.frames import TokenLogprob
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, chat, end, frontend, post, row, say


def texts(events: list[Any], index: int = 0) -> str:
    return "".join(c["delta"].get("content", "") for e in events if e != "[DONE]" for c in e["choices"] if c["index"] == index)


async def test_every_event_is_a_valid_openai_chunk_in_the_usual_order() -> None:
    call = await post(frontend(FakeIngress(say("Hel", "lo", reason="length"))).app, chat(stream=True))
    *events, done = call.events()
    assert done == "[DONE]"
    chunks = [ChatCompletionChunk.model_validate(e, strict=True) for e in events]
    assert [c.choices[0].delta.role for c in chunks] == ["assistant", None, None, None]
    assert [c.choices[0].delta.content for c in chunks] == ["", "Hel", "lo", None]
    assert [c.choices[0].finish_reason for c in chunks] == [None, None, None, "length"]
    assert len({(c.id, c.created, c.model) for c in chunks}) == 1
    assert chunks[0].id.startswith("chatcmpl-")
    assert chunks[0].model == MODEL
    assert "usage" not in events[-1]


async def test_text_held_back_until_the_end_is_part_of_the_answer() -> None:
    ingress = FakeIngress(lambda job: [[row("Hel")], [row("", fin=end(tail="lo"))]])
    assert texts((await post(frontend(ingress).app, chat(stream=True))).events()) == "Hello"
    whole = await post(frontend(ingress).app, chat())
    assert whole.json()["choices"][0]["message"]["content"] == "Hello"


async def test_usage_comes_in_one_event_without_choices_before_done() -> None:
    ingress = FakeIngress(say("a", "b", cached_tokens=16))
    call = await post(frontend(ingress).app, chat(stream=True, stream_options={"include_usage": True}))
    events = call.events()
    assert all(e["usage"] is None for e in events[:-2])
    assert events[-2]["choices"] == []
    usage = ChatCompletionChunk.model_validate(events[-2]).usage
    assert usage is not None
    assert (usage.completion_tokens, usage.total_tokens) == (2, usage.prompt_tokens + 2)
    assert usage.prompt_tokens_details is not None
    assert usage.prompt_tokens_details.cached_tokens == 16
    assert usage.prompt_tokens == ingress.jobs[0].prompt_tokens


async def test_continuous_usage_counts_up_in_every_event() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    call = await post(frontend(FakeIngress(say("a", "b"))).app, chat(stream=True, stream_options=options))
    counts = [e["usage"]["completion_tokens"] for e in call.events()[1:-1]]
    assert counts == sorted(counts)
    assert counts[-1] == 2


LOGPROBS = [TokenLogprob(72, b"H", -0.5, [(72, b"H", -0.5), (73, b"\xc3", float("-inf"))])]


async def test_chat_logprobs_have_token_bytes_and_alternatives() -> None:
    ingress = FakeIngress(lambda job: [[row("H", logprobs=LOGPROBS, fin=end())]])
    call = await post(frontend(ingress).app, chat(stream=True, logprobs=True, top_logprobs=2))
    chunk = ChatCompletionChunk.model_validate(call.events()[1])
    assert chunk.choices[0].logprobs is not None
    assert chunk.choices[0].logprobs.content is not None
    entry = chunk.choices[0].logprobs.content[0]
    assert (entry.token, entry.bytes, entry.logprob) == ("H", [72], -0.5)
    assert [(t.token, t.logprob) for t in entry.top_logprobs] == [("H", -0.5), ("\ufffd", -9999.0)]
    assert ingress.jobs[0].generation.logprobs == 2


async def test_completions_logprobs_count_offsets_over_rows() -> None:
    rows = [[row("H", logprobs=LOGPROBS)], [row("H", logprobs=LOGPROBS, fin=end())]]
    body = {"model": MODEL, "prompt": "hi", "logprobs": 1, "stream": True}
    call = await post(frontend(FakeIngress(lambda job: rows)).app, body, "/v1/completions")
    found = [event["choices"][0]["logprobs"] for event in call.events()[:2]]
    assert [f["text_offset"] for f in found] == [[0], [1]]
    assert [(f["tokens"], f["top_logprobs"]) for f in found] == [(["H"], [{"H": -0.5}])] * 2


async def test_completions_events_echo_the_prompt_first() -> None:
    body = {"model": MODEL, "prompt": "hi", "stream": True, "echo": True}
    call = await post(frontend(FakeIngress(say(" you"))).app, body, "/v1/completions")
    *events, done = call.events()
    choices = [e["choices"][0] for e in events]
    assert "".join(c["text"] for c in choices) == "hi you"
    assert (choices[-1]["finish_reason"], events[0]["object"], done) == ("stop", "text_completion", "[DONE]")


# -- when things are sent ---------------------------------------------------------------------------------------------------


async def test_no_status_is_sent_before_the_first_row() -> None:
    ingress = FakeIngress(lambda job: [])
    call = Call(frontend(ingress).app, "/v1/chat/completions", chat(stream=True))
    task = asyncio.create_task(call.run())
    await call.until(lambda: bool(ingress.answers) and ingress.answers[0].reads == 1)
    assert call.status is None
    ingress.answers[0].push([row("x", fin=end())])
    await task
    assert call.status == 200


async def test_a_slow_reader_holds_back_the_reading_of_rows() -> None:
    ingress = FakeIngress(lambda job: [[row("a")], [row("b")], [row("c", fin=end())]])
    call = Call(frontend(ingress).app, "/v1/chat/completions", chat(stream=True))
    call.gate.clear()
    task = asyncio.create_task(call.run())
    await call.until(lambda: bool(ingress.answers) and ingress.answers[0].reads == 1)
    await asyncio.sleep(0.02)
    assert ingress.answers[0].reads == 1
    call.gate.set()
    await task
    assert texts(call.events()) == "abc"


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("said", [0, 1])
async def test_a_client_that_leaves_cancels_its_job(stream: bool, said: int) -> None:
    ingress = FakeIngress(lambda job: [[row("a")]] * said)
    built = frontend(ingress)
    call = Call(built.app, "/v1/chat/completions", chat(stream=stream))
    task = asyncio.create_task(call.run())
    await call.until(lambda: bool(ingress.answers) and ingress.answers[0].reads == 1 + said)
    call.leave()
    await task
    assert ingress.answers[0].cancelled
    assert not call.complete
    assert built.metrics.registry.get_sample_value("headrace_frontend_disconnects_total") == 1


async def test_a_client_that_leaves_during_submission_is_noticed() -> None:
    ingress = FakeIngress()
    hang = asyncio.Event()

    async def submit(job: Any) -> Any:
        ingress.jobs.append(job)
        await hang.wait()

    ingress.submit = submit  # type: ignore[method-assign]
    call = Call(frontend(ingress).app, "/v1/chat/completions", chat())
    task = asyncio.create_task(call.run())
    await call.until(lambda: bool(ingress.jobs))
    call.leave()
    await task
    assert call.sent == []


async def test_a_silent_stream_gets_comments_when_asked_for() -> None:
    ingress = FakeIngress(lambda job: [[row("a")]])
    call = Call(frontend(ingress, sse_keepalive_s=0.01).app, "/v1/chat/completions", chat(stream=True))
    task = asyncio.create_task(call.run())
    await call.until(lambda: b": keep-alive" in call.body)
    ingress.answers[0].push([row("b", fin=end())])
    await task
    assert texts([e for e in call.events() if isinstance(e, dict)]) == "ab"


# -- with the real client -----------------------------------------------------------------------------------------------------


def client(ingress: FakeIngress) -> openai.AsyncOpenAI:
    transport = httpx.ASGITransport(frontend(ingress).app, raise_app_exceptions=True)
    http = httpx.AsyncClient(transport=transport, base_url="http://localhost")
    return openai.AsyncOpenAI(base_url="http://localhost/v1", api_key="none", http_client=http, max_retries=0)


async def test_the_openai_client_streams_and_collects() -> None:
    async with client(FakeIngress(say("Hel", "lo"))) as api:
        messages: Any = [{"role": "user", "content": "hi"}]
        whole = await api.chat.completions.create(model=MODEL, messages=messages)
        assert (whole.choices[0].message.content, whole.choices[0].finish_reason) == ("Hello", "stop")
        stream = await api.chat.completions.create(model=MODEL, messages=messages, stream=True)
        said = [c.choices[0].delta.content or "" async for c in stream]
        assert "".join(said) == "Hello"
        plain = await api.completions.create(model=MODEL, prompt=["a", "b"], n=2)
        assert [(c.index, c.text) for c in plain.choices] == [(i, "Hello") for i in range(4)]
