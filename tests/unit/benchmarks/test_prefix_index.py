"""The benchmark of the index runs and prints what it says it does."""

from __future__ import annotations

import json
import sys

import pytest

from benchmarks import prefix_index
from tests.support.router.index_model import IMPLEMENTATIONS

SMALL = ["prefix_index", "--rounds", "2", "--requests", "40", "--blocks", "12", "--shared", "4", "--families", "5"]


@pytest.fixture(autouse=True)
def _small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefix_index, "LOOKUPS", 20)
    monkeypatch.setattr(prefix_index.structlog, "configure", lambda **_: None)


@pytest.mark.slow
def test_it_prints_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", [*SMALL, "--memory", "2000", "--json"])
    prefix_index.main()
    document = capsys.readouterr().out
    report = json.loads(document[document.index("{\n") :])
    assert set(IMPLEMENTATIONS) <= set(report["rounds"])
    assert report["medians"]["lookup, miss (us)"]["pure"] > 0
    assert "memory at 2,000 blocks (bytes/block)" in report["medians"]
