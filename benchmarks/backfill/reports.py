"""What the workers of `benchmarks.backfill.world` tell their router: load, cache events, and how many of their runs yield."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import msgspec

from benchmarks.disagg.news import News
from headrace.broker.messages import LoadReport


class Reports(News):
    """`yielding`: the batch runs of each worker that would make way."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.yielding: defaultdict[str, int] = defaultdict(int)

    def _hear_report(self, report: LoadReport) -> None:
        yielding = min(self.yielding[report.worker], report.running)
        super()._hear_report(msgspec.structs.replace(report, yielding=yielding))
