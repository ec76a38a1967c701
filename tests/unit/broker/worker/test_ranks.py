"""Every run of an engine with several ranks has one: the router's, or the one with the fewest runs."""

from __future__ import annotations

import pytest
import structlog

from headrace.broker.messages import HEADER_RANK
from headrace.broker.worker.ranks import choose_rank, loads_by_rank
from tests.unit.broker.protocol.test_runs import make


def runs(*ranks: int) -> list:  # type: ignore[type-arg]
    made = [make(n + 1, request_id=f"r{n}") for n in range(len(ranks))]
    for run, rank in zip(made, ranks, strict=True):
        run.rank = rank
    return made


def test_the_rank_that_a_router_names_is_taken() -> None:
    assert choose_rank({HEADER_RANK: "1"}, runs(1, 1, 1), ranks=2) == 1


@pytest.mark.parametrize("headers", [None, {}, {"Hr-Attempt": "2"}])
def test_without_a_router_the_rank_with_the_fewest_runs_is_taken(headers: dict[str, str] | None) -> None:
    assert choose_rank(headers, runs(0, 2, 0), ranks=3) == 1
    assert choose_rank(headers, [], ranks=3) == 0


@pytest.mark.parametrize("named", ["2", "-1", "x", "1.0", "99999999999"])
def test_a_rank_that_the_engine_does_not_have_is_reported_and_another_is_taken(named: str) -> None:
    with structlog.testing.capture_logs() as logs:
        assert choose_rank({HEADER_RANK: named}, runs(0), ranks=2) == 1
    assert [entry["event"] for entry in logs] == ["work.unknown_rank"]


def test_an_engine_with_one_rank_has_none_to_name() -> None:
    assert choose_rank({HEADER_RANK: "0"}, [], ranks=1) is None
    assert loads_by_rank(runs(0), [], ranks=1, block_size=16) == []


def test_runs_count_for_their_rank() -> None:
    held = runs(0, 1, 1)
    loads = loads_by_rank(held, held[2:], ranks=2, block_size=16)
    assert [(load.running, load.batch, load.yielding) for load in loads] == [(1, 0, 0), (2, 0, 1)]
    assert loads[1].yielding_blocks > 0
