"""The store of the nats-server damaged while the server is down: truncated, garbled, deleted.

What lies in the store may be lost by that. What clients wait for is not: judges have their open requests in memory, workers
their runs, and everything that the store is to have is made again.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Literal

import httpx
import pytest

from headrace.jetstream.embedded_server import EmbeddedServer, ServerStartError
from headrace.jetstream.settings import ServerSettings
from tests.faults.support.scene import Scene, deployed
from tests.support.machine_faults import delete, garble, garble_descriptions, truncate

pytestmark = [pytest.mark.fault, pytest.mark.timeout(200)]

STREAMS = 12
TOKEN_S = 0.02
ENGINE = (f'timing_overrides={{"decode_base_s": {TOKEN_S}, "prefill_tokens_per_s": 20000}}', "slots=64")


async def damaged(folder: Path, damage: Callable[[Path], None], *, encrypt: Literal["none", "aes"]) -> None:
    """Promise: every open request is answered in full and once, streams without a missing or repeated token. New requests get
    a typed error until the model's card is there again, seconds later. A response in the background is known all the time. No
    part is started again. Messages that a damaged store brings back are asked about and dropped. Where nats-server cannot start
    on what is left, the error names the store and the way out."""
    server = EmbeddedServer(folder / "nats", ServerSettings(encrypt=encrypt))
    async with deployed(folder, engine=ENGINE, workers=2, server=server) as scene:
        pids = scene.pids()
        opened = [scene.begin(scene.question(220)) for _ in range(STREAMS)]
        whole = [scene.begin(scene.question(150, stream=False)) for _ in range(4)]
        for asked in opened:
            await asyncio.wait_for(asked.began.wait(), 60)
        made = await background(scene)

        async def has_a_runner() -> bool:  # one that only the store has may be lost
            return await poll(scene, made) != "queued"

        await scene.until("the response has a runner", has_a_runner)
        if encrypt == "none":
            scene.deployment.server.kill()
        else:  # killed, nats-server 2.15.1 may lose a stream of an encrypted store, which is not the damage tried here
            await scene.deployment.server.stop_async()
        await asyncio.to_thread(damage, scene.deployment.server.data_dir / "store")
        try:
            await scene.deployment.server.start_async()
        except ServerStartError as error:  # no limit of memory can save a store that nats-server cannot read
            if f"If its store {scene.deployment.server.data_dir / 'store'} is damaged" not in str(error):
                raise
            return

        async def all_is_well() -> None:
            while (status := await poll(scene, made)) in ("queued", "in_progress"):
                await asyncio.sleep(0.1)
            assert status == "incomplete", status  # its tokens were limited
            await scene.answered(*opened, *whole)
            await scene.well()
            await scene.serves()
            await scene.answered(*[scene.begin(scene.question(20, stream=n % 2 == 0)) for n in range(STREAMS)])
            assert scene.pids() == pids, "a part was started again"

        await unless_it_dies(server, all_is_well())


async def unless_it_dies(server: EmbeddedServer, checks: Coroutine[Any, Any, None]) -> None:
    """Wait for the checks, or for the death of a server that reads a damaged consumer only once it is used, and then asks for
    more memory than it may have: no limit can save it, as at its start."""
    checking = asyncio.ensure_future(checks)
    while not checking.done() and server.running:
        await asyncio.wait({checking}, timeout=0.1)
    if server.running:
        await checking
        return
    checking.cancel()
    await asyncio.wait({checking})
    assert "runtime: out of memory" in server.log_file.read_text(errors="replace")


async def background(scene: Scene) -> str:
    """Start a response in the background and return its id."""
    body = {"model": "sim", "input": "hello", "background": True, "max_output_tokens": 180, "temperature": 0}
    async with httpx.AsyncClient(timeout=60.0) as client:
        answer = (await client.post(f"{url(scene)}/v1/responses", json=body)).json()
    assert answer["status"] == "queued", answer
    return str(answer["id"])


async def poll(scene: Scene, response: str) -> str:
    """Return its status; a response that is not known is none."""
    async with httpx.AsyncClient(timeout=60.0) as client:
        answer = await client.get(f"{url(scene)}/v1/responses/{response}")
    assert answer.status_code in (200, 503), (answer.status_code, answer.text)
    return str(json.loads(answer.text).get("status", "in_progress"))


def url(scene: Scene) -> str:
    address = scene.deployment.frontends[0]
    return f"http://{address.host}:{address.port}"


@pytest.mark.parametrize("encrypt", ["none", "aes"])
@pytest.mark.parametrize("damage", [truncate, garble, garble_descriptions, delete])
async def test_a_store_that_is_damaged_while_the_server_is_down_costs_no_open_request(
    tmp_path: Path, damage: Callable[[Path], None], encrypt: Literal["none", "aes"]
) -> None:
    await damaged(tmp_path, damage, encrypt=encrypt)
