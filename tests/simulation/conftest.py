"""What computes in virtual time is marked so, and simulated processes log nothing: they would log a lot."""

import logging
from collections.abc import Iterator

import pytest
import structlog

REAL = frozenset({"nats_server", "own_server"})


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make test` runs these at the lowest priority beside others: what has a real server has real time limits, too."""
    if not REAL & {*getattr(item, "fixturenames", ())}:
        item.add_marker("virtual")


@pytest.fixture(autouse=True, scope="package")
def quiet() -> Iterator[None]:
    before = structlog.get_config()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    yield
    structlog.configure(**before)
