"""Batches under every fault: each line once in the right file, nothing stuck, and the first change of a state wins."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.broker.batches import results
from headrace.broker.batches.batch_run import BatchRun
from headrace.broker.batches.record import BatchRecord, LineProgress
from headrace.broker.batches.store import BatchStore, StoredBatch, batch_key
from tests.simulation.batches.deployment import scenario
from tests.simulation.search import assert_holds, assert_survives_every_step
from tests.simulation.virtual.network import CALM, SimConfig

RUNS: dict[str, dict[str, Any]] = {
    "to its end": {},
    "cancelled while it runs": {"cancel_at_s": (0.0, 1.5), "slow_s": 2.0},
    "cancelled near its end": {"cancel_at_s": (0.3, 0.9)},
    "expired": {"window": "1m", "behind_s": 57.0, "slow_s": 20.0},
    "expired near its end": {"window": "1m", "behind_s": 58.0, "slow_s": 2.0},
    "failed": {"broken": True},
    "cancelled while it is validated": {"broken": True, "cancel_at_s": (0.0, 0.01)},
}
CANCELLED = RUNS["cancelled while it runs"]
KILLS = ("crash", "crash+")  # just before a message, and shortly after it
OTHERS = ("powercut", "freeze", "cut", "gap", "outage")
EVERY = 3  # each of the others is tried at one of so many steps


@pytest.mark.parametrize(
    ("run", "kind"), [(run, kind) for run in RUNS for kind in (*KILLS, *OTHERS) if kind in KILLS or "expired" not in run]
)
@pytest.mark.slow
def test_a_batch_survives_a_fault_before_and_after_each_write(run: str, kind: str) -> None:
    every = 1 if kind in KILLS else EVERY
    offset = 0 if kind in KILLS else OTHERS.index(kind) % EVERY
    assert assert_survives_every_step(scenario(CALM, **RUNS[run]), kinds=[kind], every=every, offset=offset) > 50 // every


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize(
    "config",
    [SimConfig(noise=0.05), SimConfig(noise=0.1, dedupe=False), SimConfig(noise=0.05, full=0.1)],
    ids=["noise", "no dedupe", "full queues"],
)
def test_a_batch_survives_several_faults(run: str, config: SimConfig) -> None:
    assert assert_holds(scenario(config, **RUNS[run]), range(25)) > 1000


def test_a_batch_expires_with_one_end_for_each_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "LOOK_S", 3.0)
    slow = scenario(SimConfig(noise=0.05), until_s=200.0, window="1m", slow_s=300.0)
    assert assert_holds(slow, range(15)) > 1000


def test_a_window_that_ends_about_when_the_last_line_does_leaves_one_end(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the seed the batch is complete or expired: never both, and each line is in one file."""
    monkeypatch.setattr(results, "LOOK_S", 1.0)
    ends: set[str] = set()
    move = BatchRun._move

    async def noted(self: BatchRun, stored: StoredBatch, status: Any, **changes: Any) -> StoredBatch:
        written = await move(self, stored, status, **changes)
        ends.add(written.record.status)
        return written

    monkeypatch.setattr(BatchRun, "_move", noted)
    near = scenario(SimConfig(noise=0.05), until_s=250.0, window="1m", slow_s=35.0)
    assert assert_holds(near, range(20)) > 1000
    assert {"completed", "expired"} <= ends


def seen_to_fail(**options: Any) -> None:
    with pytest.raises(AssertionError):
        assert_holds(scenario(SimConfig(noise=0.1), **options), range(60))


def test_without_compare_and_set_at_the_revision_that_was_read_a_cancel_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    async def replace(self: BatchStore, stored: StoredBatch, record: BatchRecord) -> StoredBatch:
        key = batch_key(record.tenant, record.id)
        newest = await self._bucket.get(key)
        assert newest is not None
        return StoredBatch(record, await self._bucket.update(key, msgspec.json.encode(record), revision=newest.revision))

    monkeypatch.setattr(BatchStore, "replace", replace)
    seen_to_fail(**CANCELLED)


def test_without_an_end_for_lines_beyond_the_cursor_a_batch_is_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    close = BatchRun._close_lines

    async def only_published(self: BatchRun, record: Any, plan: Any, looks: Any, numbers: Any) -> None:
        if not isinstance(numbers, range):
            await close(self, record, plan, looks, numbers)

    monkeypatch.setattr(BatchRun, "_close_lines", only_published)
    seen_to_fail(**CANCELLED)


def test_without_a_result_of_every_line_files_are_incomplete(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LineProgress, "complete", property(lambda self: not self.out))
    seen_to_fail(slow_s=2.0)


def test_a_cursor_that_moves_before_the_acks_loses_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    async def publish(self: BatchRun, stored: StoredBatch, plan: Any, looks: Any, room: int) -> None:
        record, progress = stored.record, looks.progress
        await self._write(stored, self._counted(record, progress, cursor=record.cursor + room))
        wanted = progress.open(plan.published(record.cursor, record.cursor + room))
        await self._parts.fan_out.publish(record, await self._parts.fan_out.lines(record, plan, wanted))
        progress.publish(wanted)

    monkeypatch.setattr(BatchRun, "_publish", publish)
    seen_to_fail()
