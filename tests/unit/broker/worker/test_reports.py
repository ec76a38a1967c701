"""Load reports keep their distance, and events go out together."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from headrace.broker.codec import decode
from headrace.broker.messages.events import JobEvents, LoadReport
from headrace.broker.protocol.preemption import Yielding
from headrace.broker.settings import SessionSettings, Timing
from headrace.broker.worker.reports import Reports, loads_by_rank
from headrace.broker.worker_deps import WorkerDeps
from headrace.jetstream.subjects import Subjects
from tests.support.virtual_time import in_virtual_time
from tests.unit.broker.worker.bench import Bench
from tests.unit.broker.worker.test_intake import runs


def test_an_engine_with_one_rank_reports_none() -> None:
    assert loads_by_rank(runs(0), Yielding(), ranks=1, block_size=16) == []


def test_runs_count_for_their_rank() -> None:
    held = runs(0, 1, 1)
    loads = loads_by_rank(held, Yielding(found=held[2:]), ranks=2, block_size=16)
    assert [(load.running, load.batch, load.yielding) for load in loads] == [(1, 0, 0), (2, 0, 1)]
    assert loads[1].yielding_blocks > 0


class FakeMessaging:
    def __init__(self) -> None:
        self.sent: list[tuple[float, str, bytes]] = []

    def send(self, subject: str, data: bytes, *, reply: str = "") -> None:
        self.sent.append((asyncio.get_running_loop().time(), subject, data))

    @property
    def times(self) -> list[float]:
        return [round(at, 4) for at, _, _ in self.sent]


def reports_over(messaging: FakeMessaging, timing: Timing | None = None) -> Reports:
    settings = SessionSettings(timing=timing or Timing())
    deps = WorkerDeps(messaging=messaging, subjects=Subjects(), settings=settings)  # type: ignore[arg-type]
    return Reports(deps, pool="p", worker="w")


LOADS = "hr.load.p.w"


@contextlib.asynccontextmanager
async def reporting(*, period_s: float, gap_s: float) -> AsyncIterator[tuple[Reports, FakeMessaging]]:
    messaging = FakeMessaging()
    reports = reports_over(messaging, Timing(load_period_s=period_s, load_gap_s=gap_s))
    worker = Bench(epoch=7).runs
    task = asyncio.create_task(reports.run(lambda n: worker.load_report(n, Yielding(runs=2, slots=3, blocks=40))))
    await asyncio.sleep(0)
    try:
        yield reports, messaging
    finally:
        task.cancel()
        await asyncio.wait([task])


def test_a_change_is_reported_at_once_but_reports_keep_their_distance():
    async def main() -> None:
        async with reporting(period_s=0.2, gap_s=0.005) as (reports, messaging):
            start = messaging.times[0]
            await asyncio.sleep(0.05)
            reports.load_changed()
            await asyncio.sleep(0)
            for _ in range(12):
                await asyncio.sleep(0.001)
                reports.load_changed()
            await asyncio.sleep(0.1)
            assert [round(at - start, 4) for at in messaging.times] == [0.0, 0.05, 0.055, 0.06, 0.065]

    in_virtual_time(main)


def test_without_a_change_a_report_comes_every_period():
    async def main() -> None:
        async with reporting(period_s=0.2, gap_s=0.005) as (_, messaging):
            await asyncio.sleep(0.85)
            start = messaging.times[0]
            assert [round(at - start, 4) for at in messaging.times] == [0.0, 0.2, 0.4, 0.6, 0.8]
            assert [decode(LoadReport, data).n for _, _, data in messaging.sent] == [1, 2, 3, 4, 5]
            assert {subject for _, subject, _ in messaging.sent} == {LOADS}
            last = decode(LoadReport, messaging.sent[-1][2])
            assert (last.worker, last.epoch, last.at, last.slots, last.running) == ("w", 7, 5.0, 4, 0)
            assert (last.yielding, last.yielding_blocks) == (2, 40)

    in_virtual_time(main)


def test_events_of_five_milliseconds_go_out_together():
    async def main() -> None:
        messaging = FakeMessaging()
        sender = reports_over(messaging)
        sender.add("prefilled", "a", 1, 40, uncached=8)
        await asyncio.sleep(0.004)
        sender.add("settled", "b", 2, 30)
        await asyncio.sleep(0.004)
        ((_, subject, data),) = messaging.sent
        assert subject == "hr.ev.p"
        events = decode(JobEvents, data).events
        assert [(e.kind, e.id, e.attempt, e.worker, e.tokens, e.uncached) for e in events] == [
            ("prefilled", "a", 1, "w", 40, 8),
            ("settled", "b", 2, "w", 30, 0),
        ]

    in_virtual_time(main)
