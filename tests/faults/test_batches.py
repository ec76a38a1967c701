"""A batch of thousands of lines while everything is killed, and while it is cancelled: each line once, in the right file."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import Any

import openai
import pytest
from openai import AsyncOpenAI

from headrace.tools.chaos.deployment import MODEL
from headrace.workers.sim.tokens import expected_text
from tests.faults.support.scene import Scene, deployed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(400)]

LINES = 5000
TOKENS = 6
CANCELLED_S = 30.0  # several times what it takes on a quiet machine
VICTIMS = (("frontend", 0), ("worker", 0), ("router", 0), ("server", 0), ("frontend", 1), ("worker", 1))
FAST = ('timing_overrides={"decode_base_s": 0.004, "prefill_tokens_per_s": 20000}', "slots=64")


def prompt(number: int) -> list[int]:
    return [300 + number // 1000, 400 + number % 1000, *range(500, 520)]


def line(number: int) -> bytes:
    """Each 50th line is refused."""
    tokens = -1 if number % 50 == 0 else TOKENS
    body = {"model": MODEL, "prompt": prompt(number), "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
    return json.dumps(request).encode() + b"\n"


class Client:
    """An `openai` client that goes to whichever frontend answers."""

    def __init__(self, scene: Scene) -> None:
        addresses = scene.deployment.frontends
        self._clients = [
            AsyncOpenAI(base_url=f"http://{a.host}:{a.port}/v1", api_key="none", max_retries=0, timeout=20) for a in addresses
        ]

    async def __call__(self, what: Any) -> Any:
        async with asyncio.timeout(60):
            while True:
                for client in self._clients:
                    try:
                        return await what(client)
                    except (openai.APIConnectionError, openai.InternalServerError, openai.RateLimitError):
                        await asyncio.sleep(0.1)

    async def close(self) -> None:
        for client in self._clients:
            await client.close()


async def lines_of(client: Client, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    text = (await client(lambda c: c.files.content(file_id))).text
    found = [json.loads(one) for one in text.splitlines()]
    assert len({one["custom_id"] for one in found}) == len(found)
    return {one["custom_id"]: one for one in found}


async def test_each_line_is_answered_once_whatever_is_killed(tmp_path: Path) -> None:
    async with deployed(tmp_path, workers=2, frontends=2, engine=FAST) as scene:
        client = Client(scene)
        data = b"".join(line(number) for number in range(1, LINES + 1))
        file = await client(lambda c: c.files.create(file=("in.jsonl", data), purpose="batch"))
        made = await client(
            lambda c: c.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        )
        killed: list[str] = []
        until = time.monotonic() + 250
        next_kill = time.monotonic() + 1
        while True:
            batch = await client(lambda c: c.batches.retrieve(made.id))
            assert time.monotonic() < until, (batch, killed, scene.tails()[-3000:])
            if batch.status in ("completed", "failed", "cancelled", "expired"):
                break
            if time.monotonic() >= next_kill and batch.status == "in_progress" and len(killed) < len(VICTIMS):
                kind, n = VICTIMS[len(killed)]
                if kind == "server":
                    scene.deployment.server.kill()
                    await asyncio.sleep(1)
                    await scene.deployment.server.start_async()
                else:
                    scene.deployment.kill(scene.deployment.of_kind(kind)[n])
                killed.append(f"{kind} {n}")
                next_kill = time.monotonic() + 1.5
            await asyncio.sleep(0.25)
        refused = {f"c{number}" for number in range(1, LINES + 1) if number % 50 == 0}
        counts = batch.request_counts.model_dump()
        assert (batch.status, counts) == (
            "completed",
            {"total": LINES, "completed": LINES - len(refused), "failed": len(refused)},
        )
        output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
        assert errors.keys() == refused
        assert output.keys() == {f"c{number}" for number in range(1, LINES + 1)} - refused
        for name, one in output.items():
            text = one["response"]["body"]["choices"][0]["text"]
            assert text == expected_text(prompt(int(name[1:])), TOKENS), name
        print(f"killed while it ran: {', '.join(killed)}")
        assert len(killed) >= 4
        await client.close()


async def test_a_cancelled_batch_is_over_soon_and_none_of_its_lines_runs_on(tmp_path: Path) -> None:
    slow = ('timing_overrides={"decode_base_s": 0.02, "prefill_tokens_per_s": 20000}', "slots=64")
    async with deployed(tmp_path, workers=2, frontends=2, engine=slow) as scene:
        client = Client(scene)
        names = {f"c{number}" for number in range(1, LINES + 1)}
        data = b"".join(line(number) for number in range(1, LINES + 1))
        file = await client(lambda c: c.files.create(file=("in.jsonl", data), purpose="batch"))
        made = await client(
            lambda c: c.batches.create(input_file_id=file.id, endpoint="/v1/completions", completion_window="24h")
        )
        async with asyncio.timeout(60):
            while (await client(lambda c: c.batches.retrieve(made.id))).request_counts.completed < 200:
                await asyncio.sleep(0.1)
        cancelled = await client(lambda c: c.batches.cancel(made.id))
        assert cancelled.status in ("cancelling", "cancelled")
        async with asyncio.timeout(CANCELLED_S):
            while (batch := await client(lambda c: c.batches.retrieve(made.id))).status != "cancelled":
                await asyncio.sleep(0.1)
        output, errors = await lines_of(client, batch.output_file_id), await lines_of(client, batch.error_file_id)
        assert output.keys() | errors.keys() == names
        assert not output.keys() & errors.keys()
        closed = [one["custom_id"] for one in errors.values() if one["error"] and one["error"]["code"] == "batch_cancelled"]
        assert len(output) >= 200
        assert len(closed) > LINES // 2
        await scene.until("no line runs any more", lambda: held_by_none(scene))
        await scene.at_rest()
        await client.close()


async def held_by_none(scene: Scene) -> bool:
    return await scene.held() == 0
