"""The broker that `benchmarks.worker_cost` makes up has all that a worker asks of one."""

from __future__ import annotations

import argparse
from unittest import mock

import pytest

from benchmarks import worker_cost


async def test_a_worker_serves_all_requests_of_the_benchmark(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(worker_cost, "gc", mock.Mock())  # its settings would stay for all tests after this one
    await worker_cost.measure(argparse.Namespace(requests=4, streams=2, tokens=3, prompt_tokens=20, runs=1))
    assert float(capsys.readouterr().out.splitlines()[-1]) > 0
