"""Whole deployments of the simulator, started by a test and gone after it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.support.up_process import RunningUp


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make` runs this folder for its mark alone: nothing in it may be without."""
    item.add_marker("fault")


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., RunningUp]]:
    """`start(*flags)`: a ready `headrace up --engine sim`."""
    running: list[RunningUp] = []

    def start(*flags: str) -> RunningUp:
        running.append(RunningUp(tmp_path, *flags))
        running[-1].until_ready()
        return running[-1]

    yield start
    for up in running:
        up.stop()
