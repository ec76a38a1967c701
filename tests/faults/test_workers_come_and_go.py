"""Workers killed, added, drained and removed under real clients: nothing fails, and every text is exact."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from headrace.broker.codec import decode, encode
from headrace.broker.messages.control import Inspect, Inspection
from headrace.commands.control import live_workers
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.subjects import Subjects
from headrace.workers.sim.tokens import expected_text
from tests.support.sim_streams import client_of, in_threads, wrong_with
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.fault

SLOW = ("--engine-arg", 'timing_overrides={"decode_base_s": 0.01}')


def holders(up: RunningUp) -> dict[str, tuple[int, int]]:
    """Worker id → (pid, runs it holds)."""

    async def ask() -> dict[str, tuple[int, int]]:
        names = Subjects()
        nats = up.state()["nats"]
        options = ConnectOptions.from_context(nats["context"]) if nats["context"] else ConnectOptions(servers=(nats["url"],))
        async with await Connection.connect(options, subjects=names) as connection:
            found = {}
            for member in await live_workers(connection, names):
                answer = await connection.request(names.control(member.worker), encode(Inspect()), timeout_s=5)
                found[member.worker] = (member.pid, len(decode(Inspection, answer).runs))
            return found

    return asyncio.run(ask())


def test_a_stream_survives_its_workers_death_with_the_exact_text(start: Callable[..., RunningUp]) -> None:
    up = start("--workers", "2", *SLOW)
    up.until("both workers joined", lambda: len(holders(up)) == 2)
    prompt = [int(i) for i in range(200, 260)]
    with client_of(up) as api:
        stream = api.completions.create(
            model="sim",
            prompt=prompt,
            max_tokens=300,
            temperature=0,
            stream=True,
            extra_body={"ignore_eos": True},
            stream_options={"include_usage": True},
        )
        text, usage, killed = "", None, None
        for chunk in stream:
            if chunk.usage is not None:
                usage = chunk.usage
            for choice in chunk.choices:
                text += choice.text
            if killed is None and len(text) > 200:
                (killed,) = [pid for pid, runs in holders(up).values() if runs]
                os.kill(killed, signal.SIGKILL)
    assert killed is not None
    assert text == expected_text(prompt, 300)
    assert usage is not None
    assert (usage.prompt_tokens, usage.completion_tokens) == (60, 300)
    up.until("the killed worker is replaced", lambda: len(holders(up)) == 2 and killed not in dict(holders(up).values()))


def test_no_request_fails_while_workers_are_added_drained_and_removed(start: Callable[..., RunningUp], tmp_path: Path) -> None:
    up = start("--workers", "1", *SLOW)
    stop = threading.Event()
    failures: list[str] = []
    answered = [0]

    def ask(number: int) -> None:
        n = 0
        with client_of(up) as api:
            while not stop.is_set() and not failures:
                if wrong := wrong_with(api, [1000 + number, 2000 + n], 40):
                    failures.append(wrong)
                n += 1
                answered[0] += 1

    with in_threads(ask, 4, stop=stop.set):
        url = up.state()["nats"]["url"]
        command = [
            sys.executable,
            "-P",
            "-m",
            "headrace",
            "worker",
            "--engine",
            "sim",
            "--nats",
            url,
            "--name",
            "second",
            *SLOW,
        ]
        second = subprocess.Popen(command, cwd=tmp_path, stderr=subprocess.DEVNULL)
        up.until(
            "the second worker has work", lambda: any(w.startswith("second") and runs for w, (_, runs) in holders(up).items())
        )
        drain = [sys.executable, "-P", "-m", "headrace", "worker", "drain", "second", "--nats", url, "--grace", "0"]
        subprocess.run(drain, check=True, capture_output=True, timeout=30, cwd=tmp_path)
        assert second.wait(20) == 0
        before = answered[0]
        up.until("the first one goes on alone", lambda: bool(failures) or answered[0] > before + 8)
    assert failures == []
    assert [w for w, (_, runs) in holders(up).items() if w.startswith("second") or runs] == []


def test_a_client_that_leaves_frees_its_slot_in_the_engine(start: Callable[..., RunningUp]) -> None:
    up = start(*SLOW)
    with client_of(up) as api:
        streams = [
            api.completions.create(
                model="sim", prompt=[5, number], max_tokens=30_000, stream=True, extra_body={"ignore_eos": True}
            )
            for number in range(3)
        ]
        for stream in streams:
            next(iter(stream))
        assert [runs for _, runs in holders(up).values()] == [3]
        for stream in streams:
            stream.close()
    up.until("all slots are free", lambda: [runs for _, runs in holders(up).values()] == [0])
