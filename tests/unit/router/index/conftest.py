"""Tests of the index run on both forms of its source, interpreted and compiled."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.router.index_model import IMPLEMENTATIONS


@pytest.fixture(params=IMPLEMENTATIONS)
def implementation(request: pytest.FixtureRequest) -> Any:
    return request.param
