"""Reports the workers of `benchmarks.backfill.world` to their router: load, cache events, and how many of their runs yield."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from benchmarks.disagg.news import News
from headrace.broker.messages.events import LoadReport


class Reports(News):
    """`batch`: the batch runs of each worker; `yielding`: those that would make way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.batch: defaultdict[str, int] = defaultdict(int)
        self.yielding: defaultdict[str, int] = defaultdict(int)

    def _hear_report(self, report: LoadReport) -> None:
        yielding = min(self.yielding[report.worker], report.running)
        super()._hear_report(msgspec.structs.replace(report, batch=self.batch[report.worker], yielding=yielding))
