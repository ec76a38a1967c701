"""The mock back end, as a gateway sees it."""

from __future__ import annotations

import asyncio
import json

from headrace.chat.streamed_answer import served_models
from headrace.tools.peer_bench.mock_back_end import MODEL, answer, serve
from headrace.tools.serve_bench.load import Target, bodies, run_closed


async def test_every_token_asked_for_is_streamed_over_connections_that_are_kept() -> None:
    async with await serve(0) as server:
        target = Target("127.0.0.1", server.sockets[0].getsockname()[1], MODEL)
        outcome = await run_closed(target, bodies(MODEL, requests=9, words=3, tokens=7, seed=1), streams=2, timeout_s=30)
        names = await asyncio.to_thread(served_models, f"http://127.0.0.1:{target.port}")
    assert (outcome.ok, outcome.failed, outcome.chunks) == (9, 0, 63)
    assert names == [MODEL]


async def test_a_request_that_comes_in_pieces_is_answered_once_it_is_whole() -> None:
    body = json.dumps({"stream": True, "max_tokens": 2}).encode()
    async with await serve(0) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", server.sockets[0].getsockname()[1])
        for part in (b"POST /v1/chat/completions HTTP/1.1\r\ncontent-", b"length: %d\r\n\r\n" % len(body), body[:5], body[5:]):
            writer.write(part)
            await asyncio.sleep(0.01)
        told = await asyncio.wait_for(reader.readuntil(b"0\r\n\r\n"), 30)
        writer.close()
    assert told == answer(body)
    assert told.count(b'"content":"word "') == 2


def test_a_chat_that_is_not_streamed_is_answered_whole() -> None:
    told = json.loads(answer(b'{"max_tokens": 3}').partition(b"\r\n\r\n")[2])
    assert told["choices"][0]["message"]["content"].split() == ["word"] * 3
