import asyncio

import pytest

from benchmarks.client import Workload, run_workload

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"
CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
ROLE = b'data: {"choices":[{"delta":{"role":"assistant","content":""}}]}\n\n'
OURS = b'data: {"choices":[{"delta":{"content":"sea"}}]}\n\n'
OTHERS = b'data: {"choices":[{"delta":{"role":null,"content":"sea","tool_calls":null}}]}\n\n'
QUOTED = b'data: {"choices":[{"delta":{"content":"{\\"content\\":\\"x\\"}"}}]}\n\n'


@pytest.mark.parametrize("event", [OURS, OTHERS, QUOTED])
async def test_an_event_with_content_counts_once_however_it_is_written(event: bytes) -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(HEAD + ROLE + event * 3 + b"data: [DONE]\n\n")
        await writer.drain()
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        outcome = await run_workload("127.0.0.1", port, Workload(streams=1, requests=1, tokens=3), timeout_s=10)
    assert (outcome.ok, outcome.chunks) == (1, 3), outcome.errors


async def test_the_last_chunk_of_an_answer_is_not_taken_for_the_next_answer() -> None:
    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        for _ in range(2):
            await reader.readuntil(b"\r\n\r\n")
            event = OURS + b"data: [DONE]\n\n"
            writer.write(CHUNKED + b"%x\r\n%s\r\n" % (len(event), event))
            await writer.drain()
            await asyncio.sleep(0.05)
            writer.write(b"0\r\n\r\n")
        await reader.read()
        writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        port = server.sockets[0].getsockname()[1]
        outcome = await run_workload("127.0.0.1", port, Workload(streams=1, requests=2, tokens=1), timeout_s=10)
    assert (outcome.ok, outcome.failed) == (2, 0), outcome.errors
