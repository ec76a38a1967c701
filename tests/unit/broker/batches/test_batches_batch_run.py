"""A batch goes step by step to its end, whatever was done of it before."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping, Sequence

import msgspec
import pytest

from headrace.broker.batches import batch_run, results
from headrace.broker.batches.batch_run import BatchRun
from headrace.broker.batches.record import BatchRecord, LineCounts, line_name
from headrace.broker.durable.stored_job import parse_job
from headrace.broker.messages.durable import JobResult, JobStatus, ResultResponse, ResultTokens
from headrace.jetstream.errors import PayloadTooLarge, QueueFull
from tests.support.batch_fakes import Scene
from tests.unit.broker.batches.test_batches_validation import CHAT, line
from tests.unit.broker.batches.test_states import record

TURNS = 10_000  # of the event loop, within which every batch here gets where it should


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """No wait takes time: a test counts turns of the event loop, so a machine that stands still for seconds fails none."""
    monkeypatch.setattr(results, "LOOK_S", 0.0)
    for name in ("RETRY_S", "FULL_S", "NOTICE_S"):
        monkeypatch.setattr(batch_run, name, 0.0)


async def until(reached: Callable[[], Awaitable[bool]]) -> None:
    """Let others run until it is so."""
    for _ in range(TURNS):
        if await reached():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"not so after {TURNS} turns")


class Play:
    """One batch, and a carrier that answers what was published."""

    def __init__(self, lines: int = 4, **settings: int) -> None:
        self.scene = Scene(**settings)
        self.scene.files.stored["_", "file-1"] = b"".join(line(number) for number in range(1, lines + 1))
        self.batch = record(endpoint=CHAT, owner="me", expires_at=90_000)
        self.answered = 0

    async def start(self, **changes: object) -> None:
        self.batch = msgspec.structs.replace(self.batch, **changes)
        await self.scene.store.create(self.batch)

    def answer(self, status: JobStatus = "done") -> None:
        """Commit results of all jobs that were published since."""
        for _, data, headers, _ in self.scene.messaging.published[self.answered :]:
            job = parse_job(data, headers, tenant="_", seq=1, stored=0.0)
            response = ResultResponse(status_code=200, request_id="r", body=msgspec.Raw(b"{}"))
            tokens = ResultTokens(prompt=3, completion=2)
            result = JobResult(id=job.name, status=status, custom_id=job.custom_id, response=response, tokens=tokens)
            self.scene.results.stored.setdefault(job.name, result)
        self.answered = len(self.scene.messaging.published)

    def answer_only(self, *numbers: int) -> None:
        """Commit results of these lines alone."""
        self.answer()
        names = {line_name(self.batch.id, number) for number in numbers}
        self.scene.results.stored = {name: result for name, result in self.scene.results.stored.items() if name in names}

    async def record(self) -> BatchRecord:
        return (await self.scene.store.read("_", self.batch.id)).record

    async def run(self, status: str = "", *, answers: bool = True) -> BatchRecord:
        task = asyncio.create_task(BatchRun(self.scene.parts(), "_", self.batch.id, "me").run())

        async def reached() -> bool:
            if task.done() or (await self.record()).status == status:
                return True
            if answers:
                self.answer()
            return False

        await until(reached)
        task.cancel()
        return await self.record()

    async def write_files(self) -> asyncio.Task[None]:
        """Start an owner whose files are written and not named yet: it waits there."""
        self.scene.files.paused = asyncio.Event()
        task = asyncio.create_task(BatchRun(self.scene.parts(), "_", self.batch.id, "me").run())

        async def written() -> bool:
            self.answer()
            return self.scene.files.waiting

        await until(written)
        return task

    def custom_ids(self, file_id: str | None) -> list[str]:
        assert file_id is not None
        return [json.loads(each)["custom_id"] for each in self.scene.files.stored["_", file_id].splitlines()]


async def test_a_batch_goes_from_its_file_to_its_results() -> None:
    play = Play(lines=5, window_lines=2)
    await play.start()
    done = await play.run()
    assert (done.status, done.counts) == ("completed", LineCounts(total=5, completed=5))
    assert (done.model, done.tokens) == ("m", ResultTokens(prompt=15, completion=10))
    assert play.custom_ids(done.output_file_id) == ["c1", "c2", "c3", "c4", "c5"]
    assert done.error_file_id is None
    assert None not in (done.in_progress_at, done.finalizing_at, done.completed_at)


async def test_no_more_lines_are_out_than_the_window_has() -> None:
    play = Play(lines=20, window_lines=4)
    await play.start()
    running = asyncio.create_task(BatchRun(play.scene.parts(), "_", play.batch.id, "me").run())

    async def out() -> bool:
        return (await play.record()).cursor >= 4

    await until(out)
    for _ in range(100):
        await asyncio.sleep(0)
    assert len(play.scene.messaging.published) == 4
    assert (await play.record()).cursor == 4
    running.cancel()


async def test_a_wrong_file_fails_the_batch_with_its_errors() -> None:
    play = Play()
    play.scene.files.stored["_", "file-1"] += b"x\n"
    await play.start()
    failed = await play.run()
    assert (failed.status, [error.line for error in failed.errors]) == ("failed", [5])
    assert not play.scene.messaging.published


async def test_a_batch_over_its_tenants_quota_fails() -> None:
    play = Play(tenant_lines=3)
    await play.start()
    assert [error.code for error in (await play.run()).errors] == ["queued_lines_exceeded"]


async def test_a_file_that_is_gone_before_validation_fails_the_batch() -> None:
    play = Play()
    play.scene.files.stored.clear()
    await play.start()
    assert [error.code for error in (await play.run()).errors] == ["input_file_not_found"]


async def test_a_file_that_is_gone_later_closes_the_batch_and_keeps_what_was_done() -> None:
    play = Play(lines=4, window_lines=2)
    await play.start()
    await play.run("in_progress", answers=False)
    play.scene.files.stored.clear()
    ended = await play.run()
    assert (ended.status, [error.code for error in ended.errors]) == ("cancelled", ["input_file_not_found"])
    assert ended.counts.total == 4
    assert not ended.counts.open


async def test_another_file_under_the_same_id_is_not_taken_for_the_first() -> None:
    play = Play()
    await play.start(status="in_progress", plan=1, input_digest="other", counts=LineCounts(total=4))
    ended = await play.run()
    assert ended.status == "cancelled"
    assert not play.scene.messaging.published


async def test_cancelled_lines_have_an_end_also_beyond_the_cursor_and_finished_ones_are_kept() -> None:
    play = Play(lines=6, window_lines=2)
    await play.start()
    await play.run("in_progress", answers=False)
    play.answer()
    stored = await play.scene.store.read("_", play.batch.id)
    await play.scene.store.replace(stored, msgspec.structs.replace(stored.record, status="cancelling"))
    ended = await play.run(answers=False)
    assert ended.status == "cancelled"
    done = play.custom_ids(ended.output_file_id) if ended.output_file_id else []
    assert sorted(done + play.custom_ids(ended.error_file_id)) == [f"c{n}" for n in range(1, 7)]
    assert len(play.scene.stopped.names) == ended.counts.failed


async def test_a_batch_past_its_window_expires() -> None:
    play = Play(lines=2)
    await play.start(expires_at=1000)
    assert (await play.run()).status == "expired"
    later = Play(lines=2)
    await later.start()
    await later.run("in_progress", answers=False)
    later.scene.now = 90_000.0
    expired = await later.run(answers=False)
    assert (expired.status, expired.counts.failed, expired.output_file_id) == ("expired", 2, None)


async def test_a_full_queue_leaves_the_cursor_where_it_is() -> None:
    play = Play()
    full = 3

    def refuse() -> None:
        nonlocal full
        if full:
            full -= 1
            raise QueueFull("full")

    play.scene.messaging.refuse = refuse
    await play.start()
    assert (await play.run()).counts.completed == 4


async def test_a_line_that_fits_into_no_message_fails_alone() -> None:
    play = Play(lines=1)

    def refuse() -> None:
        raise PayloadTooLarge("large")

    play.scene.messaging.refuse = refuse
    await play.start()
    assert (await play.run()).counts == LineCounts(total=1, failed=1)


async def test_an_order_of_another_version_is_published_again_from_its_start() -> None:
    play = Play()
    await play.start()
    running = await play.run("in_progress", answers=False)
    stored = await play.scene.store.read("_", play.batch.id)
    await play.scene.store.replace(stored, msgspec.structs.replace(running, plan=99, cursor=4))
    assert (await play.run()).counts.completed == 4


async def test_another_owners_batch_is_left_alone() -> None:
    play = Play()
    await play.start(owner="other")
    assert (await play.run()).status == "validating"


class Webhook:
    """A receiver that takes the event after some refusals."""

    def __init__(self, refusals: int) -> None:
        self.refusals = refusals
        self.calls: list[str] = []

    async def send(self, record: BatchRecord) -> bool:
        self.calls.append(record.status)
        return len(self.calls) > self.refusals


@pytest.mark.parametrize(("refusals", "outcome", "calls"), [(0, "sent", 1), (2, "sent", 3), (9, "given_up", 4)])
async def test_the_webhook_is_called_until_it_takes_the_event_or_the_tries_are_over(
    refusals: int, outcome: str, calls: int
) -> None:
    play = Play(webhook_tries=4)
    play.scene.notice = webhook = Webhook(refusals)
    await play.start()
    ended = await play.run()
    assert ended.notice == outcome
    assert webhook.calls == ["completed"] * calls


async def test_a_crash_of_a_step_ends_neither_the_batch_nor_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    play = Play()
    monkeypatch.setattr(batch_run, "LONGEST_RETRY_S", 0.0)
    step, broken = BatchRun._step, 2

    async def breaks(self: BatchRun) -> bool:
        nonlocal broken
        if broken:
            broken -= 1
            raise KeyError("bug")
        return await step(self)

    monkeypatch.setattr(BatchRun, "_step", breaks)
    await play.start()
    assert (await play.run()).status == "completed"


async def test_an_owner_that_was_replaced_cannot_end_the_batch_and_leaves_no_files() -> None:
    """The owner is cut off after it has written its files; another takes the batch over before it names them."""
    play = Play(lines=3)
    await play.start()
    stale = await play.write_files()
    stored = await play.scene.store.read("_", play.batch.id)
    assert stored.record.status == "finalizing"
    await play.scene.store.replace(stored, msgspec.structs.replace(stored.record, owner="other"))
    play.scene.files.paused.set()
    await stale
    assert (await play.record()).status == "finalizing"
    assert set(play.scene.files.stored) == {("_", "file-1")}
    play.scene.files.paused = None
    await BatchRun(play.scene.parts(), "_", play.batch.id, "other").run()
    done = await play.record()
    assert (done.status, play.custom_ids(done.output_file_id)) == ("completed", ["c1", "c2", "c3"])
    assert len(play.scene.files.stored) == 2


async def test_files_of_a_try_whose_owner_died_are_swept_by_the_next() -> None:
    play = Play(lines=2)
    await play.start()
    dying = await play.write_files()
    dying.cancel()
    assert len(play.scene.files.stored) == 2
    play.scene.files.paused = None
    done = await play.run()
    assert done.status == "completed"
    assert set(play.scene.files.stored) == {("_", "file-1"), ("_", done.output_file_id)}


class Looks:
    """Notes which lines of a batch are looked at."""

    def __init__(self, play: Play, monkeypatch: pytest.MonkeyPatch) -> None:
        self.pages: list[list[int]] = []
        get_many = play.scene.results.get_many

        async def noted(tenant: str, tokens: Sequence[str]) -> Mapping[str, JobResult]:
            self.pages.append([int(token.rpartition("-")[2]) for token in tokens])
            return await get_many(tenant, tokens)

        monkeypatch.setattr(play.scene.results, "get_many", noted)

    async def until(self, reached: Callable[[], bool]) -> None:
        async def now() -> bool:
            return reached()

        await until(now)


async def test_only_the_oldest_lines_that_are_out_are_looked_at_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six lines in pages of two: a result of line 1 is seen, one of line 6 only when all of them are looked at."""
    monkeypatch.setattr(results, "POLLED_PAGE", 2)
    monkeypatch.setattr(results, "LOOK_ALL_S", 3600.0)
    play = Play(lines=6)
    await play.start()
    seen = Looks(play, monkeypatch)
    running = asyncio.create_task(BatchRun(play.scene.parts(), "_", play.batch.id, "me").run())
    await seen.until(lambda: [5, 6] in seen.pages)  # the first look is one at all of them
    seen.pages.clear()
    await seen.until(lambda: len(seen.pages) >= 5)
    assert seen.pages[:5] == [[1, 2]] * 5
    play.answer_only(1, 6)
    seen.pages.clear()
    await seen.until(lambda: len(seen.pages) >= 4)
    assert seen.pages[:4] == [[1, 2], [3, 4], [2, 3], [2, 3]]  # where a line has a result, the next page is looked at as well
    running.cancel()


async def test_lines_that_overtake_others_are_seen_too(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name, value in ((results, "POLLED_PAGE", 2), (results, "LOOK_ALL_S", 0.0), (batch_run, "COUNT_S", 0.0)):
        monkeypatch.setattr(module, name, value)
    play = Play(lines=6)
    await play.start()
    running = asyncio.create_task(BatchRun(play.scene.parts(), "_", play.batch.id, "me").run())

    async def published() -> bool:
        return len(play.scene.messaging.published) == 6

    async def seen() -> bool:
        return (await play.record()).counts.completed == 1

    await until(published)
    play.answer_only(6)
    await until(seen)
    running.cancel()
