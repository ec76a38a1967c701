"""Each result is read once for counts and files, also where lines are closed, and a batch goes on without a disk."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from itertools import count

import msgspec
import pytest

from headrace.broker.batches.batch_run import BatchRun
from headrace.broker.batches.record import line_name
from headrace.broker.batches.results import result_poller
from headrace.broker.batches.results.seen_results import SeenResults
from headrace.broker.batches.scratch_space import ScratchSpace
from headrace.broker.durable.names import JobRef
from headrace.broker.messages import JobResult
from headrace.jetstream.errors import NotConnected
from tests.unit.broker.batches.test_batch_run import Play, soon

__all__ = ["soon"]


class Reads:
    """Counts the results that reads have shown."""

    def __init__(self, play: Play, monkeypatch: pytest.MonkeyPatch, *, fails: int = 0) -> None:
        """`fails`: the number of the read that fails, 0 = none."""
        self.shown = 0
        get_many = play.scene.results.get_many
        numbers = count(1)

        async def counted(tenant: str, tokens: Sequence[str]) -> Mapping[str, JobResult]:
            if next(numbers) == fails:
                raise NotConnected("the server is away")
            found = await get_many(tenant, tokens)
            self.shown += len(found)
            return found

        monkeypatch.setattr(play.scene.results, "get_many", counted)


async def ended(play: Play, *, answers: bool = True) -> list[str]:
    task = asyncio.create_task(BatchRun(play.scene.parts(), "_", play.batch.id, "me").run())
    async with asyncio.timeout(60):
        while not task.done():  # with a thread in between, turns of the loop do not count
            if answers:
                play.answer()
            await asyncio.sleep(0.001)
    record = await play.record()
    files = [file for file in (record.output_file_id, record.error_file_id) if file]
    return [custom_id for file in files for custom_id in play.custom_ids(file)]


@pytest.mark.parametrize(("space", "reads"), [(100_000, 1), (0, 2)])
async def test_a_result_is_read_once_where_its_line_can_be_kept(
    space: int, reads: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    play = Play(lines=12, window_lines=6)
    play.scene.scratch = ScratchSpace(space)
    shown = Reads(play, monkeypatch)
    await play.start()
    assert await ended(play) == [f"c{n}" for n in range(1, 13)]
    assert shown.shown == 12 * reads
    assert play.scene.scratch.left == space


async def test_results_that_the_carrier_here_has_seen_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(lines=12, window_lines=6)
    play.scene.scratch = ScratchSpace(100_000)
    play.scene.seen = seen = SeenResults()
    shown, stored, answer = Reads(play, monkeypatch), play.scene.results.stored, play.answer

    def carry() -> None:
        """Answer as a carrier here does, which tells of three in four lines, and of one that the batch does not have."""
        before = set(stored)
        answer()
        for name in stored.keys() - before:
            if not name.endswith(("-4", "-8", "-12")):
                seen.see(JobRef(tenant="_", name=name, batch=play.batch.id), stored[name])
                seen.see(JobRef(tenant="_", name=line_name(play.batch.id, 1000), batch=play.batch.id), stored[name])

    monkeypatch.setattr(play, "answer", carry)
    await play.start()
    assert await ended(play) == [f"c{n}" for n in range(1, 13)]
    record = await play.record()
    assert (record.counts.completed, record.tokens.prompt) == (12, 36)
    assert shown.shown == 3
    name = line_name(play.batch.id, 1)
    seen.see(JobRef(tenant="_", name=name, batch=play.batch.id), stored[name])
    assert seen.take("_", play.batch.id) == {}, "the batch is over, and its results are still kept"


async def test_a_new_owner_reads_on_where_its_first_look_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(result_poller, "PAGE", 4)
    play = Play(lines=12)
    play.scene.scratch = ScratchSpace(100_000)
    await play.start()
    first = asyncio.create_task(BatchRun(play.scene.parts(), "_", play.batch.id, "me").run())
    async with asyncio.timeout(60):
        while len(play.scene.messaging.published) < 12 or (await play.record()).cursor < 12:
            await asyncio.sleep(0.001)
    first.cancel()
    await asyncio.wait([first])
    play.answer()
    reads = Reads(play, monkeypatch, fails=3)
    assert len(await ended(play)) == 12
    assert reads.shown == 12
    assert play.scene.scratch.left == 100_000


async def test_ends_of_closed_lines_are_not_read_again(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play(lines=9, window_lines=3)
    await play.start()
    await play.run("in_progress", answers=False)
    play.scene.scratch = ScratchSpace(100_000)
    shown = Reads(play, monkeypatch)
    stored = await play.scene.store.read("_", play.batch.id)
    await play.scene.store.replace(stored, msgspec.structs.replace(stored.record, status="cancelling"))
    assert await ended(play, answers=False) == [f"c{n}" for n in range(1, 10)]
    assert shown.shown == 0
