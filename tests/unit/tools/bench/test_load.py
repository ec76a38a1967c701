"""How a server is asked."""

from __future__ import annotations

import socket

import pytest

from headrace.base.errors import CommandError
from headrace.tools.bench.load import Target, bodies, poisson, run_at, run_closed, steady, target, trace_body, trace_times
from headrace.tools.replay_bench.trace import Trace, TraceRequest
from tests.unit.tools.bench.fake_server import REFUSED, serving, streamed


def chats(number: int) -> list[bytes]:
    return bodies("m", requests=number, words=4, tokens=3, seed=0)


async def test_a_closed_loop_asks_all_requests_over_so_many_connections() -> None:
    async with serving(lambda _: streamed(3)) as (server, asked):
        outcome = await run_closed(server, chats(10), streams=3, timeout_s=30)
    assert (outcome.ok, outcome.failed, outcome.chunks) == (10, 0, 30)
    assert (len(asked.bodies), asked.connections) == (10, 3)
    assert len(outcome.first_token_s) == len(outcome.total_s) == 10


async def test_every_end_is_told_also_that_of_a_request_that_failed() -> None:
    ends: list[int] = []
    async with serving(lambda number: REFUSED if number == 2 else streamed(1)) as (server, _):
        await run_closed(server, chats(4), streams=2, timeout_s=30, on_end=lambda: ends.append(1))
        await run_at(server, chats(3), [0.0] * 3, timeout_s=30, on_end=lambda: ends.append(2))
    assert ends == [1] * 4 + [2] * 3


async def test_an_open_loop_does_not_wait_for_answers() -> None:
    async with serving(lambda _: streamed(1), takes_s=0.3) as (server, asked):
        outcome = await run_at(server, chats(5), [0.0] * 5, timeout_s=30)
    assert (outcome.ok, asked.connections) == (5, 5)


@pytest.mark.parametrize("closed", [True, False])
async def test_a_server_that_is_not_there_is_named(closed: bool) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        server = Target("127.0.0.1", probe.getsockname()[1], "m")
    asking = (
        run_closed(server, chats(4), streams=2, timeout_s=30) if closed else run_at(server, chats(2), [0.0, 0.0], timeout_s=30)
    )
    with pytest.raises(CommandError, match=f"127.0.0.1:{server.port}"):
        await asking


async def test_a_server_that_does_not_answer_ends_the_run() -> None:
    async with serving(lambda _: b"") as (server, _):
        with pytest.raises(CommandError, match="did not end within"):
            await run_closed(server, chats(2), streams=2, timeout_s=0.2)


@pytest.mark.parametrize("url", ["https://a", "a:80", "http://", "http://a:x", "http://a?b=c"])
def test_an_address_that_cannot_be_asked_is_refused(url: str) -> None:
    with pytest.raises(CommandError):
        target(url, "m")


def test_equal_blocks_of_a_trace_are_equal_words() -> None:
    one, other = (
        trace_body("m", TraceRequest(at_s=0.0, tokens=600, output=5, chain=chain)).decode() for chain in ((1, 2), (1, 3))
    )
    prompts = [text.split('"content": "')[1].split('"')[0].split() for text in (one, other)]
    assert [len(prompt) for prompt in prompts] == [600, 600]
    assert prompts[0][:512] == prompts[1][:512]
    assert prompts[0][512:] != prompts[1][512:]
    assert '"max_tokens": 5' in one


def test_times_of_an_open_loop() -> None:
    assert steady(4.0, 3) == [0.0, 0.25, 0.5]
    drawn = poisson(10.0, 4000, seed=3)
    assert drawn == sorted(drawn)
    assert 380 < drawn[-1] < 420  # 4,000 at 10 a second
    requests = tuple(TraceRequest(at_s=at_s, tokens=1, output=1, chain=()) for at_s in (5.0, 6.0, 9.0))
    assert trace_times(Trace("t", requests), 2.0) == [0.0, 0.5, 2.0]
