"""A judge with nothing open, and the port that it speaks through."""

from __future__ import annotations

import pytest

from headrace.broker.protocol.judge import Judge
from tests.unit.broker.protocol.judge_bench import Port


@pytest.fixture
def port() -> Port:
    return Port()


@pytest.fixture
def judge(port: Port) -> Judge:
    return Judge(port)
