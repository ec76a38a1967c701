"""The index, interpreted and compiled, against the model, after any history."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.router.errors import UnknownWorker
from headrace.router.index.view import create_index
from tests.support.router.index_histories import BLOCKS, STEP, check
from tests.support.router.index_model import IMPLEMENTATIONS, ModelIndex


@settings(max_examples=100, deadline=None, derandomize=True)
@given(history=st.lists(STEP, max_size=40), chains=st.lists(BLOCKS, min_size=1, max_size=3))
def test_any_history_is_answered_like_the_model(history: list[Any], chains: list[list[int]]) -> None:
    indexes, model = [create_index(name) for name in IMPLEMENTATIONS], ModelIndex()
    for name, worker, *arguments in history:
        if worker in model.names or name in ("add_worker", "drop_worker"):
            for target in (*indexes, model):
                getattr(target, name)(worker, *arguments)
        else:
            for index in indexes:
                with pytest.raises(UnknownWorker, match=worker):
                    getattr(index, name)(worker, *arguments)
    for index in indexes:
        check(index, model, chains)
    for chain in chains:
        assert all(index.match(chain) == indexes[0].match(chain) for index in indexes)
