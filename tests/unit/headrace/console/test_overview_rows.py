"""The tables of a deployment say what leases and load reports say, summed by pool."""

from __future__ import annotations

from typing import Any

from headrace.broker.messages import LoadReport, RouterMember, WorkerMember
from headrace.console.overview_rows import StartingWorker, deployment_tables

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
