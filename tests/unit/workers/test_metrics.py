"""Words that come over the wire cannot fill the metrics of a worker."""

from __future__ import annotations

import pytest

from headrace.broker.metrics import BoundedLabel
from headrace.workers import metrics


def test_reasons_beyond_the_limit_share_one_label(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_reasons", BoundedLabel(metrics.MOST_REASONS))
    counters = [metrics.prefills("local", f"made up {i}") for i in range(metrics.MOST_REASONS + 100)]
    assert len(set(map(id, counters))) == metrics.MOST_REASONS + 1
    assert metrics.prefills("local", "made up 0") is counters[0]
