"""A disk that is full for a moment: nats-server never writes again to a stream that met it, so `up` starts it again."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from headrace.up.nats_part import ROOM_BYTES
from tests.faults.support.up_scene import UpScene, simulator, upped
from tests.support.machine_faults import fill, small_disk_at

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

TOKEN_S = 0.02
DURABLE = 4
MENDED_S = 5.0
BUSY_S = 5.0  # for a machine that does other things as well
LEAST_S = 4.0  # of a durable answer
BODY: dict[str, Any] = {"model": "sim", "prompt": "Which way does the water go?", "temperature": 0}


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes. Only who may mount has one."""
    try:
        with small_disk_at(tmp_path / "disk", 4 * ROOM_BYTES) as place:
            yield place
    except PermissionError:
        pytest.skip("mounting is not permitted here")


class Durable:
    """Reads one durable stream, and goes on after its last event when the connection ends too early."""

    def __init__(self, url: str, tokens: int) -> None:
        self._url = f"{url}/v1/completions"
        self._body = {**BODY, "max_tokens": tokens, "stream": True}
        self._headers = {"Headrace-Durable": "1"}
        self.pieces: list[str] = []
        self.came: list[float] = []
        self.task = asyncio.create_task(self._run())

    async def _run(self) -> str:
        async with httpx.AsyncClient(timeout=60) as client:
            while not await self._read(client):
                await asyncio.sleep(0.2)
        return "".join(self.pieces)

    async def _read(self, client: httpx.AsyncClient) -> bool:
        name = ""
        async with client.stream("POST", self._url, json=self._body, headers=self._headers) as response:
            async for line in response.aiter_lines():
                field, _, value = line.partition(": ")
                if field == "id":
                    name = value
                elif value == "[DONE]":
                    return True
                elif field == "data" and name:
                    self._headers["Last-Event-ID"] = name
                    self.pieces += [choice["text"] for choice in json.loads(value)["choices"]]
                    self.came.append(time.monotonic())
                    name = ""
        return False

    def goes_on_after(self, moment_s: float) -> bool:
        return self.task.done() or bool(self.came and self.came[-1] > moment_s)


async def brief_fault(scene: UpScene, disk: Path, full_s: float, *, loaded: bool) -> float:
    """Fill the disk for a while beside stored work, and return after how many seconds with room all of it went on."""
    url = scene.up.state()["url"]
    tokens = int((full_s + LEAST_S) / TOKEN_S)
    stop = asyncio.Event()

    async def chats() -> None:
        while not stop.is_set():
            scene.begin(scene.question(4, stream=False))
            await asyncio.sleep(0.25)

    async with httpx.AsyncClient(timeout=60) as client:
        whole = await client.post(f"{url}/v1/completions", json={**BODY, "max_tokens": tokens})
        expected = whole.json()["choices"][0]["text"]
        streams = [Durable(url, tokens) for _ in range(DURABLE)]
        chatting = asyncio.create_task(chats()) if loaded else None
        asked = {"model": "sim", "input": "What is it?", "max_output_tokens": 64}
        said = (await client.post(f"{url}/v1/responses", json=asked)).json()["output"]
        await scene.until("all streams have begun", lambda: all(len(one.came) > 3 for one in streams))
        background = (await client.post(f"{url}/v1/responses", json={**asked, "background": True})).json()["id"]
        ballast = disk / "ballast"
        await asyncio.to_thread(fill, ballast)
        await asyncio.sleep(full_s)
        ballast.unlink()
        room_s = time.monotonic()
        stop.set()

        async def well() -> bool:
            if not (all(one.goes_on_after(room_s + 0.2) for one in streams) and await scene.ready()):
                return False
            return (await scene.ask(scene.question(4, stream=False))).status == 200

        await asyncio.sleep(0.5)  # what was on its way to the clients
        await scene.until("all goes on", well, timeout_s=60)
        took_s = time.monotonic() - room_s
        assert [await asyncio.wait_for(one.task, 60) for one in streams] == [expected] * DURABLE

        async with asyncio.timeout(30):
            while (told := (await client.get(f"{url}/v1/responses/{background}")).json())["status"] in (
                "queued",
                "in_progress",
            ):
                await asyncio.sleep(0.1)
        assert [item["content"] for item in told["output"]] == [item["content"] for item in said]
        if chatting is not None:
            await chatting
    print(f"full for {full_s} s, loaded {loaded}: all goes on after {took_s:.2f} s")
    return took_s


def nats_lines(scene: UpScene) -> list[dict[str, Any]]:
    return [json.loads(line) for line in scene.up.log_file.read_text().splitlines() if '"nats.' in line]


async def test_stored_work_goes_on_after_a_disk_that_was_full_for_a_moment(disk: Path) -> None:
    """Promise: within seconds, by itself, and exact; the log names the streams."""
    async with upped(disk, "--workers", "2", "--routers", "1", *simulator(TOKEN_S)) as scene:
        took_s = [await brief_fault(scene, disk, full_s, loaded=loaded) for full_s, loaded in ((0.3, True), (1.0, False))]
        assert max(took_s) < MENDED_S + BUSY_S, took_s
        lines = nats_lines(scene)
        named = {stream for line in lines if line["event"] == "nats.unwritable" for stream in line["streams"]}
        assert "HR_RSP" in named  # in the shorter time the rest of a page may have taken all that was written
        assert "nats.restarting" in {line["event"] for line in lines}


@pytest.mark.long_fault
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("loaded", [False, True], ids=["alone", "chats"])
@pytest.mark.parametrize("full_s", [0.1, 0.3, 0.5, 1.0, 10.0])
async def test_stored_work_goes_on_each_time_a_disk_was_full(disk: Path, full_s: float, loaded: bool) -> None:
    """Ten times in one deployment, in which the disk may be full again soon after."""
    async with upped(disk, "--workers", "2", "--routers", "1", *simulator(TOKEN_S)) as scene:
        took_s = [await brief_fault(scene, disk, full_s, loaded=loaded) for _ in range(10)]
        assert max(took_s) < MENDED_S + BUSY_S, took_s
        assert sorted(took_s)[5] < MENDED_S, took_s
