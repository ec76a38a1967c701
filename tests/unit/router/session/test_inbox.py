"""What comes of a worker with several ranks reaches the scheduler by place."""

from __future__ import annotations

import random
from typing import Any

from headrace.broker.codec import encode
from headrace.broker.messages.events import JobEvent, JobEvents, LoadReport, RankLoad
from headrace.jetstream.ports import Message
from headrace.router.session.inbox import RouterInbox
from tests.support.router.router_parts import router_deps, router_state
from tests.support.router.scheduler import RandomScheduler

NOTHING: Any = None


class Heard(RandomScheduler):
    """Writes down what it is told."""

    def __init__(self) -> None:
        super().__init__(random.Random(1))
        self.reports: list[tuple[str, int]] = []
        self.events: list[tuple[str, str]] = []

    def on_report(self, report: LoadReport, now_s: float) -> None:
        self.reports.append((report.worker, report.running))

    def on_event(self, event: JobEvent, now_s: float) -> None:
        self.events.append((event.kind, event.worker))


class Deaf:
    def on_event(self, event: JobEvent, now_s: float) -> None: ...


def inbox(scheduler: Heard) -> RouterInbox:
    deaf: Any = Deaf()
    return RouterInbox(router_deps(), router_state(scheduler), deaf, deaf, NOTHING)


async def test_a_load_report_is_one_per_rank() -> None:
    heard = Heard()
    report = LoadReport(
        worker="w", epoch=1, n=1, at=0.0, slots=8, running=3, waiting=0, ranks=[RankLoad(running=1), RankLoad(running=2)]
    )
    inbox(heard).on_report(Message("hr.load.p.w", encode(report)))
    assert heard.reports == [("w~0", 1), ("w~1", 2)]


async def test_a_job_event_counts_for_the_rank_that_it_names() -> None:
    heard = Heard()
    events = [
        JobEvent("started", "a", 1, "w", rank=1),
        JobEvent("settled", "b", 1, "v"),
        JobEvent("moved", "c", 1, "w", rank=0),
    ]
    inbox(heard).on_events(Message("hr.ev.p", encode(JobEvents(events=events))))
    assert heard.events == [("started", "w~1"), ("settled", "v"), ("moved", "w~0")]
