from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator

import msgspec
import pytest
from structlog.testing import capture_logs

from headrace.broker.batches.record import BatchRecord, LineCounts
from headrace.broker.codec import encode
from headrace.broker.messages.control import Routed
from headrace.broker.messages.events import JobEvent, JobEvents, LoadReport
from headrace.broker.messages.members import WorkerMember
from headrace.jetstream.client import Connection
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from headrace.planner import observe
from headrace.planner.observe import DeploymentWatch, PoolKey, RequestOutcomes, stale, step_sights
from tests.support.planner_sights import seen, worker


def test_load_is_stale_when_too_few_have_reported_lately() -> None:
    fresh, old = worker("a"), worker("b", report_age_s=60.0)
    assert not stale([fresh, old], fresh_s=5)
    assert stale([fresh, old, old], fresh_s=5)


def test_workers_that_have_just_joined_make_no_load_stale() -> None:
    assert not stale([worker("a", report_age_s=None)], fresh_s=5)
    assert not stale([], fresh_s=5)


def test_workers_are_found_by_role_and_state() -> None:
    there = seen(0, worker("a"), worker("b", state="asleep"), worker("d", "decode"))
    assert [one.worker for one in there.of_role("aggregated")] == ["a"]
    assert [one.worker for one in there.of_role("aggregated", "asleep")] == ["b"]


def told(outcomes: RequestOutcomes, *events: tuple[float, str, str], tokens: int = 11, attempt: int = 1) -> None:
    """Have events heard: (time, kind, id)."""
    for at, kind, request_id in events:
        outcomes.on_event(JobEvent(kind, request_id, attempt, "w", tokens=tokens), at)  # type: ignore[arg-type]


def test_times_are_from_arrival_to_first_token_and_between_tokens() -> None:
    outcomes = RequestOutcomes()
    told(outcomes, (10.0, "placed", "a"), (10.5, "prefilled", "a"), (12.5, "settled", "a"))
    outcomes.waited("a", 3.0)
    ((worker, one),) = outcomes.take()
    assert worker == "w"
    assert one.ttft_s == pytest.approx(3.5)
    assert one.itl_s == pytest.approx(0.2)
    assert outcomes.take() == [], "once"


def test_a_wait_that_is_told_before_the_end_counts_as_well() -> None:
    outcomes = RequestOutcomes()
    told(outcomes, (10.0, "placed", "a"))
    outcomes.waited("a", 3.0)
    told(outcomes, (10.5, "prefilled", "a"), (10.6, "settled", "a"), tokens=1)
    ((_, one),) = outcomes.take()
    assert (one.ttft_s, one.itl_s) == (pytest.approx(3.5), pytest.approx(0.1))


def test_a_request_that_moves_has_its_first_token_once_and_lost_time_is_part_of_it() -> None:
    outcomes = RequestOutcomes()
    told(outcomes, (10.0, "placed", "a"), (11.0, "prefilled", "a"))
    told(outcomes, (14.0, "placed", "a"), (15.0, "prefilled", "a"), (16.0, "settled", "a"), attempt=2)
    ((_, one),) = outcomes.take()
    assert (one.ttft_s, one.itl_s) == (pytest.approx(1.0), pytest.approx(0.5))


def test_of_a_request_whose_beginning_was_not_heard_nothing_is_said() -> None:
    outcomes = RequestOutcomes()
    told(outcomes, (10.0, "prefilled", "a"), (11.0, "settled", "a"))
    told(outcomes, (10.0, "placed", "b"), (11.0, "settled", "b"))
    told(outcomes, (10.0, "placed", "c"), attempt=2)
    outcomes.waited("d", 1.0)
    assert outcomes.take() == []


def test_requests_that_never_end_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observe, "MOST", 3)
    outcomes = RequestOutcomes()
    for n in range(10):
        told(outcomes, (float(n), "placed", f"r{n}"))
    assert len(outcomes._open) == 3
    for n in range(10):
        told(outcomes, (20.0, "prefilled", f"r{n}"), (21.0, "settled", f"r{n}"))
    assert len(outcomes.take()) == 3


def test_a_step_without_work_or_time_teaches_nothing() -> None:
    good = LoadReport(worker="w", epoch=1, n=1, at=0.0, slots=8, running=0, waiting=0, step_s=0.1, step_decodes=1)
    bad = [msgspec.structs.replace(good, step_s=0.0), msgspec.structs.replace(good, step_decodes=0)]
    assert len(step_sights(WorkerMember(worker="w", pool="p", model="m"), [*bad, good])) == 1


POOL = "m-00000001"
KEY = PoolKey(POOL)


@pytest.fixture
async def watch(connection: Connection, subjects: Subjects) -> AsyncIterator[DeploymentWatch]:
    made = DeploymentWatch(connection, subjects)
    await made.start()
    yield made
    await made.stop()


async def join(connection: Connection, subjects: Subjects, worker: str, **kw: object) -> None:
    member = WorkerMember(worker=worker, pool=POOL, model="m", slots=8, blocks=100, block_size=16, **kw)  # type: ignore[arg-type]
    await connection.bucket(subjects.bucket("members")).put(f"worker.{POOL}.{worker}", encode(member))


async def report(connection: Connection, subjects: Subjects, worker: str, **kw: object) -> None:
    values: dict[str, object] = {"epoch": 1, "n": 1, "at": time.time(), "slots": 8, "running": 2, "waiting": 0, **kw}
    connection.send(subjects.load(POOL, worker), encode(LoadReport(worker=worker, **values)))  # type: ignore[arg-type]


def tell(connection: Connection, subjects: Subjects, *events: JobEvent) -> None:
    connection.send(subjects.events(POOL), encode(JobEvents(events=list(events))))


async def record(connection: Connection, subjects: Subjects, request_id: str, *, queue: str = POOL) -> None:
    """Store the record of a placement, as a router does, after a wait of 30 s."""
    before = (await connection.stream_state(subjects.stream("ROUTE"))).last_seq
    routed = Routed(at=time.time(), id=request_id, worker="w1", tokens=100, waited_s=30.0)
    connection.send(subjects.route(queue), encode(routed))
    async with asyncio.timeout(10):
        while (await connection.stream_state(subjects.stream("ROUTE"))).last_seq == before:
            await asyncio.sleep(0.02)


async def waits(watch: DeploymentWatch) -> list[float]:
    """Return the waits of the requests that were placed since the last look."""
    return [one.waited_s for one in (await watch.observe())[KEY].placed]


async def test_arrivals_are_first_placements_and_the_growth_of_what_waits(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    first = (await watch.observe())[KEY]
    assert first.arrived is None  # nothing to compare with yet
    assert first.waiting == 0
    for _ in range(3):
        await connection.publish(subjects.req(POOL, "std"), b"x")
    tell(
        connection,
        subjects,
        JobEvent("placed", "a", 1, "w1", 100, 40, by="r1"),
        JobEvent("placed", "b", 2, "w1", 100, 40, by="r1"),  # it arrived before
        JobEvent("settled", "c", 1, "w1", 77),
    )
    await asyncio.sleep(0.2)
    seen = (await watch.observe())[KEY]
    assert (seen.arrived, seen.waiting) == (4, 3)
    assert [(one.prompt, one.uncached) for one in seen.placed] == [(100, 40)]
    assert seen.outputs == (77,)
    assert (await watch.observe())[KEY].arrived == 0


async def test_requests_that_have_ended_are_seen_with_their_times(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    await record(connection, subjects, "before")
    await watch.observe()
    await record(connection, subjects, "a")
    tell(connection, subjects, JobEvent("placed", "a", 1, "w1", 100, 40, by="r1"), JobEvent("prefilled", "a", 1, "w1", 100, 40))
    tell(connection, subjects, JobEvent("settled", "a", 1, "w1", 5), JobEvent("settled", "unheard", 1, "w1", 5))
    await connection.barrier()
    (ended,) = (await watch.observe())[KEY].ended
    assert 30.0 <= ended.ttft_s < 60.0
    assert 0.0 <= ended.itl_s < 10.0
    assert (await watch.observe())[KEY].ended == ()


async def test_the_first_placement_record_of_an_empty_stream_is_read(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    assert await waits(watch) == []
    await record(connection, subjects, "first")
    assert await waits(watch) == [30.0]
    await record(connection, subjects, "second")
    assert await waits(watch) == [30.0]
    assert await waits(watch) == [], "each is read once"


async def records(connection: Connection, subjects: Subjects, number: int) -> None:
    """Store so many records of placements, each after a wait of 30 s."""
    before = (await connection.stream_state(subjects.stream("ROUTE"))).last_seq
    for n in range(number):
        connection.send(subjects.route(POOL), encode(Routed(at=1.0, id=f"r{n}", worker="w1", tokens=100, waited_s=30.0)))
    async with asyncio.timeout(20):
        while (await connection.stream_state(subjects.stream("ROUTE"))).last_seq < before + number:
            await asyncio.sleep(0.02)


async def test_all_records_since_the_last_look_are_read_however_many(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    await records(connection, subjects, 2_500)
    assert len(await waits(watch)) == 2_500
    assert await waits(watch) == []


async def test_records_beyond_what_a_look_reads_are_left_out_and_told(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observe, "MOST_SEEN", 1_000)
    await join(connection, subjects, "w1")
    await records(connection, subjects, 2_500)
    with capture_logs() as logs:
        assert len(await waits(watch)) == 1_000
    [told] = [line for line in logs if line["event"] == "planner.placements_left_out"]
    assert (told["pool"], told["read"], told["up_to"] - told["after"]) == (POOL, 1_000, 1_500)
    await records(connection, subjects, 1)
    assert len(await waits(watch)) == 1, "the next look begins behind what was left out"
    await records(connection, subjects, 1_000)
    with capture_logs() as logs:
        assert len(await waits(watch)) == 1_000
        assert await waits(watch) == []
    assert not [line for line in logs if line["event"] == "planner.placements_left_out"], "there were no more"


async def test_records_of_a_queue_that_is_seen_late_are_read_from_the_start_of_the_watch(
    connection: Connection, subjects: Subjects
) -> None:
    await record(connection, subjects, "before the start")
    watch = DeploymentWatch(connection, subjects)
    await watch.start()
    await record(connection, subjects, "of another", queue="other-00000001")
    await record(connection, subjects, "a")
    await record(connection, subjects, "b")
    await join(connection, subjects, "w1")
    assert await waits(watch) == [30.0, 30.0]
    await watch.stop()


async def test_records_are_read_where_a_router_makes_their_stream_after_the_start(
    connection: Connection, subjects: Subjects
) -> None:
    stream = subjects.stream("ROUTE")
    await connection.api.call(f"STREAM.DELETE.{stream}")
    watch = DeploymentWatch(connection, subjects)
    await watch.start()
    await join(connection, subjects, "w1")
    assert await waits(watch) == []
    await ensure_topology(connection, Topology(subjects))
    await record(connection, subjects, "first")
    assert await waits(watch) == [30.0]
    await watch.stop()


async def test_records_are_read_when_their_stream_was_made_again(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    for number in range(3):
        await record(connection, subjects, f"old {number}")
    assert len(await waits(watch)) == 3
    await connection.api.call(f"STREAM.DELETE.{subjects.stream('ROUTE')}")
    await ensure_topology(connection, Topology(subjects))
    await record(connection, subjects, "new")
    assert await waits(watch) == [30.0]


async def test_workers_are_seen_with_their_load_and_one_without_a_report_is_unknown(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    await join(connection, subjects, "w2", draining=True, sleeping=1)
    await report(connection, subjects, "w1", blocks_total=100, blocks_used=25, step_s=0.1, step_decodes=2)
    await asyncio.sleep(0.2)
    seen = (await watch.observe())[KEY]
    assert seen.workers is not None
    one, other = sorted(seen.workers, key=lambda worker: worker.worker)
    assert (one.running, one.kv_used, one.kv_tokens, one.state) == (2, 0.25, 1600, "serving")
    assert one.report_age_s is not None
    assert (other.report_age_s, other.state) == (None, "asleep")
    assert [(step.step_s, step.decodes, step.context_tokens) for step in seen.steps] == [(0.1, 2, 400)]


async def test_fleets_are_pools_of_their_own_and_what_waits_is_for_the_cheapest(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1", fleet="dear", price=4.0)
    await join(connection, subjects, "w2", fleet="cheap", price=1.0)
    await watch.observe()
    await connection.publish(subjects.req(POOL, "std"), b"x")
    tell(connection, subjects, JobEvent("placed", "a", 1, "w1", 100, 40, by="r1"))
    await asyncio.sleep(0.2)
    seen = await watch.observe()
    dear, cheap = seen[PoolKey(POOL, "dear")], seen[PoolKey(POOL, "cheap")]
    assert (dear.arrived, dear.waiting) == (1, 0)
    assert (cheap.arrived, cheap.waiting) == (1, 1)
    assert [one.prompt for one in dear.placed] == [100], "its requests need not be as long as those of others"
    assert cheap.placed == ()


async def test_a_pool_whose_workers_have_left_is_still_watched(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    await watch.observe()
    await connection.bucket(subjects.bucket("members")).delete(f"worker.{POOL}.w1")
    assert (await watch.observe())[KEY].workers == ()


async def test_open_lines_of_batches_are_work_with_a_deadline(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    record = BatchRecord(
        id="batch_1",
        tenant="_",
        endpoint="/v1/completions",
        input_file_id="file-1",
        completion_window="24h",
        created=time.time(),
        expires_at=int(time.time()) + 1000,
        status="in_progress",
        model="m",
        counts=LineCounts(total=10, completed=3),
    )
    await connection.bucket(subjects.bucket("batches")).put("batch_1", msgspec.json.encode(record))
    ((left_s, count),) = (await watch.observe())[KEY].backlog
    assert count == 7
    assert 900 < left_s <= 1000


async def test_events_that_cannot_be_read_are_ignored(
    connection: Connection, subjects: Subjects, watch: DeploymentWatch
) -> None:
    await join(connection, subjects, "w1")
    await watch.observe()
    connection.send(subjects.events(POOL), b"\xc1")
    connection.send(subjects.load(POOL, "w1"), b"\xc1")
    await asyncio.sleep(0.2)
    assert (await watch.observe())[KEY].arrived == 0
