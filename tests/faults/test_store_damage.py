"""The store of the nats-server damaged while the server is down: truncated, garbled, deleted.

What lies in the store may be lost by that. What clients wait for is not: judges have their open requests in memory, workers
their runs, and everything that the store is to have is made again.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from tests.faults.support.scene import Scene, deployed

pytestmark = [pytest.mark.fault, pytest.mark.timeout(100)]

STREAMS = 12
TOKEN_S = 0.02
ENGINE = (f'timing_overrides={{"decode_base_s": {TOKEN_S}, "prefill_tokens_per_s": 20000}}', "slots=64")


def truncate(store: Path) -> None:
    """Every file loses its second half, as after a power cut."""
    for file in _files(store):
        os.truncate(file, file.stat().st_size // 2)


def garble(store: Path) -> None:
    """Every file has other bytes in its middle."""
    rng = random.Random(1)
    for file in _files(store):
        data = bytearray(file.read_bytes())
        for at in range(len(data) // 3, 2 * len(data) // 3):
            data[at] = rng.randrange(256)
        file.write_bytes(data)


def garble_descriptions(store: Path) -> None:
    """What nats-server reads first of each stream has other bytes, so that it cannot read any of them."""
    for file in store.rglob("meta.inf"):
        file.write_bytes(b"?" * file.stat().st_size)


def delete(store: Path) -> None:
    """There is no store any more."""
    shutil.rmtree(store)


def _files(store: Path) -> list[Path]:
    found = [file for file in store.rglob("*") if file.is_file() and file.stat().st_size]
    assert found
    return found


async def damaged(folder: Path, damage: Callable[[Path], None]) -> None:
    """Promise: every open request is answered in full and once, streams without a missing or repeated token. New requests get
    a typed error until the model's card is there again, seconds later. A response in the background is known all the time. No
    part is started again. Messages that a damaged store brings back are asked about and dropped."""
    async with deployed(folder, engine=ENGINE, workers=2) as scene:
        pids = scene.pids()
        opened = [scene.begin(scene.question(220)) for _ in range(STREAMS)]
        whole = [scene.begin(scene.question(150, stream=False)) for _ in range(4)]
        for asked in opened:
            await asyncio.wait_for(asked.began.wait(), 60)
        made = await background(scene)
        scene.deployment.server.kill()
        await asyncio.to_thread(damage, scene.deployment.server.data_dir / "store")
        await scene.deployment.server.start_async()
        while (status := await poll(scene, made)) in ("queued", "in_progress"):
            await asyncio.sleep(0.1)
        assert status == "incomplete", status  # its tokens were limited
        await scene.answered(*opened, *whole)
        await scene.well()
        await scene.serves()
        await scene.answered(*[scene.begin(scene.question(20, stream=n % 2 == 0)) for n in range(STREAMS)])
        assert scene.pids() == pids, "a part was started again"


async def background(scene: Scene) -> str:
    """Start a response in the background and return its id."""
    body = {"model": "sim", "input": "hello", "background": True, "max_output_tokens": 180, "temperature": 0}
    async with httpx.AsyncClient() as client:
        answer = (await client.post(f"{url(scene)}/v1/responses", json=body)).json()
    assert answer["status"] == "queued", answer
    return str(answer["id"])


async def poll(scene: Scene, response: str) -> str:
    """Return its status; a response that is not known is none."""
    async with httpx.AsyncClient() as client:
        answer = await client.get(f"{url(scene)}/v1/responses/{response}")
    assert answer.status_code in (200, 503), (answer.status_code, answer.text)
    return str(json.loads(answer.text).get("status", "in_progress"))


def url(scene: Scene) -> str:
    address = scene.deployment.frontends[0]
    return f"http://{address.host}:{address.port}"


@pytest.mark.parametrize("damage", [truncate, garble, garble_descriptions, delete])
async def test_a_store_that_is_damaged_while_the_server_is_down_costs_no_open_request(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    await damaged(tmp_path, damage)
