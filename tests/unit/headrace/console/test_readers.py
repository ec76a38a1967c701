"""The prefix map tells which worker was sent how much of which prefix, and what was cached there."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path
from typing import Any

import pytest

from headrace.broker.messages.control import Routed
from headrace.broker.messages.events import LoadReport
from headrace.broker.messages.members import RouterMember, WorkerMember
from headrace.broker.part_state import PartState
from headrace.commands.run import serve_probes
from headrace.console.readers import MAP_PREFIXES, StartingWorker, deployment_tables, prefix_map, start_of, started_workers


def placed(worker: str, first: int, *, tokens: int = 100, uncached: int = 100) -> Routed:
    return Routed(at=1.0, id="r", worker=worker, tokens=tokens, uncached=uncached, hashes=first.to_bytes(8, "big") * 2)


def test_a_prefix_has_what_each_worker_was_sent() -> None:
    rows = prefix_map([(1, placed("a", 7)), (2, placed("a", 7, uncached=20)), (3, placed("b", 7)), (4, placed("b", 9))])
    assert rows[(7).to_bytes(8, "big").hex()] == {
        "tokens": 300, "cached": 80, "requests": 3, "workers": {"a": [2, 200, 80], "b": [1, 100, 0]},
    }  # fmt: skip
    assert len(rows) == 2


def test_prompts_below_a_block_are_left_out() -> None:
    assert prefix_map([(1, Routed(at=1.0, id="r", worker="a", tokens=3))]) == {}


def test_only_the_largest_prefixes_are_kept() -> None:
    rows = prefix_map([(n, placed("a", n, tokens=n)) for n in range(1, 200)])
    assert len(rows) == MAP_PREFIXES
    assert min(row["tokens"] for row in rows.values()) == 200 - MAP_PREFIXES


NOW = 100.0


def tables(workers: list[WorkerMember], reports: dict[str, LoadReport], **more: Any) -> dict[str, Any]:
    asked = {"routers": [], "frontends": 1, "stored": {}, "now": NOW, **more}
    return deployment_tables(workers=workers, reports=reports, **asked)


def report(worker: str, **more: Any) -> LoadReport:
    return LoadReport(
        worker=worker, epoch=1, n=1, at=NOW, **{"slots": 8, "running": 2, "waiting": 1, "blocks_total": 100, **more}
    )


def test_a_pool_sums_its_workers() -> None:
    found = tables(
        [WorkerMember(worker=name, pool="p", model="m", slots=8) for name in ("a", "b")],
        {name: report(name, blocks_used=used, step_s=0.1, step_decodes=2) for name, used in (("a", 10), ("b", 30))},
        routers=[RouterMember(router="r", pool="p")],
        stored={"p": {"std": 3, "hi": 0}},
    )
    assert found["pools"]["p"] == {
        "model": "m", "workers": 2, "serving": 2, "routers": 1, "running": 4, "slots": 16, "tokens_s": 40.0, "kv": 0.2,
        "waiting": {"std": 3}, "since": None, "waking": [], "fleets": {},
    }  # fmt: skip
    summary = found["summary"]["deployment"]
    assert (summary["workers"], summary["running"], summary["waiting"], summary["queued"]) == (2, 4, 3, 2)


def test_a_pool_without_workers_is_shown_with_what_waits_for_them() -> None:
    found = tables([], {}, stored={"p": {"std": 5}})
    assert found["pools"]["p"]["workers"] == 0
    assert found["pools"]["p"]["waiting"] == {"std": 5}
    assert found["summary"]["deployment"]["kv"] is None


def test_the_fleets_of_a_pool_are_apart() -> None:
    workers = [
        WorkerMember(worker=name, pool="p", model="m", slots=8, fleet=fleet, price=price)
        for name, fleet, price in (("a", "cheap", 1.0), ("b", "cheap", 1.0), ("c", "dear", 4.0))
    ]
    found = tables(workers, {name: report(name) for name in ("a", "c")})
    assert found["pools"]["p"]["fleets"] == {"cheap": [1, 2, 2, 16, 1.0], "dear": [1, 1, 2, 8, 4.0]}
    assert [row["fleet"] for row in found["workers"].values()] == ["cheap", "cheap", "dear"]


def test_workers_that_wake_and_that_start_are_named() -> None:
    waking = WorkerMember(worker="a", pool="p", model="m", draining=True, sleeping=1, waking=True, pid=5)
    found = tables([waking], {}, starting=[StartingWorker("worker-2", 6, 90, doing="x")])
    assert found["pools"]["p"]["waking"] == ["a"]
    assert found["summary"]["deployment"]["starting"] == [["worker-2", 90, "x"]]


def test_a_row_has_the_cached_blocks_per_tier() -> None:
    workers = [WorkerMember(worker="a", pool="p", model="m", slots=8)]
    assert tables(workers, {"a": report("a", tiers=[7, 2, 1])})["workers"]["a"]["tiers"] == [7, 2, 1]
    assert tables(workers, {})["workers"]["a"]["tiers"] == []


def test_a_worker_without_reports_is_late_and_its_cache_unknown() -> None:
    row = tables([WorkerMember(worker="a", pool="p", model="m", slots=8)], {})["workers"]["a"]
    assert (row["state"], row["kv"], row["late"]) == ("no report", None, True)


def test_workers_of_the_run_file_are_named_with_their_beginning(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    workers = [{"name": "worker-1", "role": "aggregated", "pid": os.getpid()}, {"name": "worker-2", "pid": None}]
    (tmp_path / "run" / "up.json").write_text(json.dumps({"workers": workers}))
    (found,) = started_workers(tmp_path)
    assert (found.name, found.pid) == ("worker-1", os.getpid())
    assert found.since > 0


@pytest.mark.parametrize("text", ["", "[]", '{"workers": [{"name": "w"}]}', '{"workers": 3}'])
def test_a_file_that_cannot_be_read_names_none(tmp_path: Path, text: str) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "up.json").write_text(text)
    assert started_workers(tmp_path) == []
    assert started_workers(None) == started_workers(tmp_path / "absent") == []


def test_a_worker_tells_what_its_start_is_at_and_one_that_does_not_answer_nothing() -> None:
    state = PartState("worker")
    state.starts("the engine is being warmed up")
    worker = StartingWorker("w", 7, 1, serve_probes("127.0.0.1", 0, state))
    assert start_of(worker) == worker._replace(doing="the engine is being warmed up")
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        silent = StartingWorker("w", 7, 1, closed.getsockname()[1])
        assert start_of(silent) == silent
    assert start_of(StartingWorker("w", 7, 1)).doing == ""
