"""`headrace up` as a whole: killed and started again, stopped under load, started twice, and on a disk that runs full."""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.broker.settings import Timing
from headrace.tools.chaos.ledger import Outcome
from headrace.up.nats_part import ROOM_BYTES
from tests.faults.support.up_scene import alive, simulator, upped
from tests.support.machine_faults import fill, small_disk_at
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

STREAMS = 12


async def test_up_is_killed_under_load_and_started_again_on_the_same_folder(tmp_path: Path) -> None:
    """Promise: every process ends with it. What clients have seen is right as far as it goes, they lose their connections, and
    the work is dropped. Started again on the same folder it answers as before, and nothing of the time before is left."""
    async with upped(tmp_path, "--workers", "2", "--routers", "1", *simulator()) as scene:
        opened = await scene.streams(STREAMS, 1000)
        queued = [scene.begin(scene.question(1000, stream=False)) for _ in range(4)]
        await asyncio.sleep(0.5)
        pids = scene.up.pids()
        assert len(pids) == 6
        scene.up.process.kill()
        for asked in (*opened, *queued):
            assert asked.task is not None
            await asked.task
            assert asked.outcome in (Outcome.CUT, Outcome.UNREACHED), (asked.outcome, asked.detail)
        await scene.until("no process is left", lambda: not alive(pids), timeout_s=10)
        scene.up.process.wait()
    async with upped(tmp_path, "--workers", "2", "--routers", "1", *simulator()) as scene:
        await scene.answered(*[scene.begin(scene.question(50, stream=n % 2 == 0)) for n in range(STREAMS)])
        await scene.settled()


async def test_up_is_stopped_under_load_and_every_answer_is_finished(tmp_path: Path) -> None:
    """Promise: open requests are answered to their end, new ones are refused in a way that can be retried, and it ends with
    code 0 in time."""
    async with upped(tmp_path, "--workers", "2", "--routers", "1", *simulator()) as scene:
        opened = await scene.streams(STREAMS, 250)
        whole = [scene.begin(scene.question(100, stream=False)) for _ in range(4)]
        await asyncio.sleep(0.3)
        pids = scene.up.pids()
        scene.up.process.send_signal(signal.SIGTERM)
        stopped = asyncio.create_task(asyncio.to_thread(scene.up.process.wait, 60))
        late = []
        while not stopped.done():
            late.append(scene.begin(scene.question(5, stream=False)))
            await asyncio.sleep(0.2)
        assert await stopped == 0
        await scene.answered(*opened, *whole)
        for asked in late:
            assert asked.task is not None
            await asked.task
            assert asked.outcome in (Outcome.ANSWERED, Outcome.REFUSED, Outcome.UNREACHED), (asked.outcome, asked.detail)
        assert any("draining" in asked.detail for asked in late), [asked.detail for asked in late]
        assert alive(pids) == []


async def test_a_second_up_on_the_same_folder_or_port_says_so_and_disturbs_nothing(tmp_path: Path) -> None:
    """Promise: it ends with code 78 and one line that names what is taken; the first one goes on."""
    async with upped(tmp_path, "--workers", "2", *simulator()) as scene:
        opened = await scene.streams(STREAMS, 250)
        port = scene.up.state()["url"].rpartition(":")[2]
        pids = scene.up.pids()
        (tmp_path / "second").mkdir()
        (tmp_path / "third").mkdir()
        same_folder = RunningUp(tmp_path / "second", "--data-dir", str(tmp_path / ".headrace"))
        same_port = RunningUp(tmp_path / "third", "--port", port)
        for second, told in ((same_folder, "another `headrace up` uses the data folder"), (same_port, f":{port}")):
            try:
                assert await asyncio.to_thread(second.process.wait, 60) == 78, second.log()
                assert told in second.log()
            finally:
                second.stop()
        await scene.answered(*opened)
        assert scene.up.pids() == pids
        await scene.settled()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of a few megabytes. Only who may mount has one."""
    try:
        with small_disk_at(tmp_path / "disk", 3 * ROOM_BYTES) as place:
            yield place
    except PermissionError:
        pytest.skip("mounting is not permitted here")


async def test_streams_go_on_while_the_disk_is_full_and_up_mends_its_server_when_there_is_room(small_disk: Path) -> None:
    """Promise: while the disk is full, for longer than any lease lives, open streams get every token, new requests get a 503
    that says why, and no part is started again. Once there is room `up` starts its nats-server again by itself, says so, and
    all is as before. Data, run file and log of `up` lie on that disk."""
    full_s = 2.25 * Timing().lease_ttl_s
    token_s = 0.05
    async with upped(small_disk, "--workers", "2", "--routers", "1", *simulator(token_s)) as scene:
        await scene.until("all parts run", lambda: len(scene.up.pids()) == 6)
        state = scene.up.state()
        short = await scene.streams(STREAMS, int(0.7 * full_s / token_s))  # end while the disk is full
        long = await scene.streams(STREAMS, int(2 * full_s / token_s))
        ballast = small_disk / "ballast"
        await asyncio.to_thread(fill, ballast)
        full_at_s = time.monotonic()
        refused = [await scene.ask(scene.question(5, stream=False, prompt=8000))]  # the rest of a page takes a small one
        await scene.until("the reason is told", lambda: scene.not_ready("does not store"))
        await scene.answered(*short)
        assert time.monotonic() - full_at_s < full_s
        await asyncio.to_thread(fill, ballast)  # what was freed since
        refused += [await scene.ask(scene.question(5, stream=False)) for _ in range(5)]
        await asyncio.sleep(max(0.0, full_at_s + full_s - time.monotonic()))
        assert await scene.not_ready("does not store")
        assert all(asked.outcome is Outcome.REFUSED and asked.status == 503 for asked in refused), refused[0].detail
        assert scene.up.pids()[0] == state["pid"]
        ballast.unlink()
        await scene.until("it is ready", scene.ready, timeout_s=30)
        await scene.answered(*long)
        await scene.answered(*[scene.begin(scene.question(20, stream=n % 2 == 0)) for n in range(STREAMS)])
        await scene.until("the run file is new", lambda: scene.up.state()["nats"]["pid"] != state["nats"]["pid"])
        now = scene.up.state()
        assert [now[kind] for kind in ("frontend", "workers", "routers")] == [
            state[kind] for kind in ("frontend", "workers", "routers")
        ], "a part was started again"
        await scene.settled()
        lines = scene.up.log_file.read_text().splitlines()  # some were cut short
        restarts = [json.loads(line) for line in lines if '"nats.restarting"' in line]
        assert len(restarts) == 1, restarts
        assert "has room again" in restarts[0]["reason"]
