"""Pooling jobs in the worker's runtime, with a scripted engine and a recording session."""

from __future__ import annotations

import asyncio
import contextlib
from array import array
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from headrace.broker.codec import encode, pack_u32
from headrace.broker.messages.control import Claim, RunVerdict
from headrace.broker.messages.frames import Finish, Row
from headrace.broker.messages.requests import Envelope, Generation, Pooling, PoolingInput
from headrace.broker.protocol.judge import Judge
from headrace.broker.protocol.run import Run, RunState
from headrace.workers.engine import Capabilities, EngineInfo, Pooled, PoolItem
from headrace.workers.errors import EngineDead, EngineError, EngineOverloaded, RequestInvalid, UnsupportedByEngine
from headrace.workers.runtime.runtime import Runtime
from tests.support.runtime_bench import INFO, TABLE, FakeEngine, FakeSession
from tests.unit.broker.protocol.judge_bench import Port, Sink, frame, opened
from tests.unit.broker.protocol.test_protocol_runs import FakeDelivery

EMBEDDER = replace(INFO, kinds=("embedding",))


class PoolingEngine(FakeEngine):
    """Takes inputs and ends them when told to."""

    def __init__(self) -> None:
        super().__init__()
        self.capabilities = Capabilities()
        self.inside: dict[str, tuple[PoolItem, asyncio.Future[Pooled]]] = {}
        self.items: list[PoolItem] = []
        self.cancelled: list[str] = []

    async def pool(self, item: PoolItem) -> Pooled:
        self.items.append(item)
        done: asyncio.Future[Pooled] = asyncio.get_running_loop().create_future()
        self.inside[item.id] = (item, done)
        try:
            return await done
        except asyncio.CancelledError:
            self.cancelled.append(item.id)
            raise
        finally:
            del self.inside[item.id]

    def finish(self, *choices: int, cached: int = 0) -> None:
        for name, (_, done) in list(self.inside.items()):
            if int(name.rsplit("-", 1)[1]) in choices:
                done.set_result(Pooled(array("f", [float(name.rsplit("-", 1)[1])]).tobytes(), cached))

    def fail(self, choice: int, error: Exception) -> None:
        for name, (_, done) in self.inside.items():
            if name.endswith(f"-{choice}"):
                done.set_exception(error)


class Bench:
    def __init__(self, runtime: Runtime, engine: PoolingEngine, session: FakeSession) -> None:
        self.runtime, self.engine, self.session = runtime, engine, session

    async def start(self, *lengths: int, finished: list[int] | None = None, payload: bytes | None = None) -> Run:
        pooling = Pooling(task="embed", inputs=[PoolingInput(pack_u32([1] * n)) for n in lengths])
        envelope = Envelope(
            id="q",
            pool="p",
            model="m",
            judge="i",
            deadline=9e9,
            created=0.0,
            kind="pool",
            tokens=sum(lengths),
            choices=len(lengths),
            priority=3,
        )
        run = Run(envelope=envelope, attempt=2 if finished else 1, history=[], run=5, delivery=FakeDelivery(1))
        run.begin([], finished or [])
        run.state = RunState.RUNNING
        self.runtime.start(run, encode(pooling) if payload is None else payload)
        await settle()
        return run


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@contextlib.asynccontextmanager
async def bench(info: EngineInfo = EMBEDDER, stall_s: float = 60.0) -> AsyncIterator[Bench]:
    engine, session = PoolingEngine(), FakeSession()
    runtime = Runtime(engine, stall_s=stall_s)  # type: ignore[arg-type]
    runtime.attach(session, info, TABLE)  # type: ignore[arg-type]
    running = asyncio.create_task(runtime.run())
    await settle()
    try:
        yield Bench(runtime, engine, session)
    finally:
        running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await running


def vectors(fins: dict[int, Finish]) -> dict[int, float]:
    return {choice: array("f", fin.vector)[0] for choice, fin in fins.items()}


async def test_every_input_is_one_choice_and_ends_by_itself() -> None:
    async with bench() as b:
        await b.start(3, 5, 4)
        assert [(item.task, len(item.token_ids), item.priority) for item in b.engine.items] == [
            ("embed", 3, 3),
            ("embed", 5, 3),
            ("embed", 4, 3),
        ]
        b.engine.finish(2)
        await settle()
        assert vectors(b.session.fins) == {2: 2.0}
        assert b.session.computed == []
        b.engine.finish(0, 1, cached=1)
        await settle()
        assert vectors(b.session.fins) == {0: 0.0, 1: 1.0, 2: 2.0}
        assert b.session.fins[1] == Finish(reason="stop", prompt_tokens=5, cached_tokens=1, vector=b.session.fins[1].vector)
        assert b.session.computed == [10]


async def test_inputs_that_end_together_leave_in_one_flush() -> None:
    async with bench() as b:
        await b.start(1, 1, 1, 1)
        before = b.session.flushes
        b.engine.finish(0, 1, 2, 3)
        await settle()
        assert b.session.flushes == before + 1


async def test_a_resumed_job_runs_only_what_has_no_end() -> None:
    async with bench() as b:
        await b.start(1, 2, 3, 4, finished=[0, 2])
        assert [len(item.token_ids) for item in b.engine.items] == [2, 4]
        b.engine.finish(1, 3)
        await settle()
        assert sorted(b.session.fins) == [1, 3]
        assert b.session.computed == [6]


async def test_a_stopped_run_leaves_the_engine_and_says_nothing_more() -> None:
    async with bench() as b:
        run = await b.start(1, 1)
        b.engine.finish(0)
        await settle()
        b.runtime.stop(run)
        await settle()
        assert len(b.engine.cancelled) == 1
        assert not b.engine.inside
        assert list(b.session.fins) == [0]
        assert (b.session.failed, b.session.moved) == ([], [])


@pytest.mark.parametrize(
    ("error", "failed", "moved"),
    [
        (RequestInvalid("no such size", param="dimensions"), ("invalid_request", "dimensions"), None),
        (UnsupportedByEngine("cannot"), ("invalid_request", None), None),
        (EngineOverloaded("full"), None, "engine_overloaded"),
        (EngineError("broken"), ("engine_error", None), None),
        (RuntimeError("bug"), None, "engine_error"),
    ],
)
async def test_the_first_input_that_fails_speaks_for_the_job_once(
    error: Exception, failed: tuple[str, str | None] | None, moved: str | None
) -> None:
    async with bench() as b:
        await b.start(1, 1, 1)
        b.engine.fail(1, error)
        b.engine.fail(2, error)
        await settle()
        assert [(fault.code, fault.param) for fault in b.session.failed] == ([failed] if failed else [])
        assert [fault.code for fault in b.session.moved] == ([moved] if moved else [])
        assert not b.engine.inside


async def test_a_dead_engine_ends_the_worker_and_not_the_job() -> None:
    async with bench() as b:
        await b.start(1, 1)
        b.engine.fail(0, EngineDead("gone"))
        await settle()
        assert b.runtime.dead.result() == "gone"
        assert (b.session.failed, b.session.moved, b.session.fins) == ([], [], {})


async def test_an_engine_that_keeps_inputs_and_says_nothing_is_dead() -> None:
    async with bench(stall_s=0.05) as b:
        await b.start(1, 1)
        async with asyncio.timeout(5):
            assert "no step for 0.05 s with 2 sequences running" in await b.runtime.dead


async def test_a_generating_worker_refuses_a_pooling_job() -> None:
    async with bench(INFO) as b:
        await b.start(1)
        assert [(fault.code, fault.param) for fault in b.session.failed] == [("invalid_request", "model")]


@pytest.mark.parametrize("lengths", [(0,), (101,), (3, 0)])
async def test_an_input_of_impossible_length_is_refused(lengths: tuple[int, ...]) -> None:
    async with bench() as b:
        await b.start(*lengths)
        assert [(fault.code, fault.param) for fault in b.session.failed] == [("invalid_request", "input")]
        assert not b.engine.items


@pytest.mark.parametrize(
    "payload", [b"\xc1", encode(Generation(token_ids=b"")), encode(Pooling(task="embed", inputs=[PoolingInput(b"abc")]))]
)
async def test_a_payload_that_cannot_be_read_is_refused(payload: bytes) -> None:
    async with bench() as b:
        await b.start(1, payload=payload)
        assert [fault.code for fault in b.session.failed] == ["invalid_request"]


async def test_as_many_choices_as_inputs_or_none() -> None:
    async with bench() as b:
        await b.start(1, 1, payload=encode(Pooling(task="embed", inputs=[PoolingInput(pack_u32([1]))])))
        assert [fault.code for fault in b.session.failed] == ["invalid_request"]


# -- vectors on their way, as the protocol sees them -------------------------------------------------------------


def ended_run(choices: int) -> Run:
    """A run of which every input has ended."""
    envelope = Envelope(
        id="q", pool="p", model="m", judge="i", deadline=9e9, created=0.0, kind="pool", tokens=9, choices=choices
    )
    run = Run(envelope=envelope, attempt=1, history=[], run=7, delivery=FakeDelivery(1))
    run.begin([], [])
    return run


def fin(number: float) -> Finish:
    return Finish(reason="stop", prompt_tokens=3, vector=array("f", [number]).tobytes())


def taken(sink: Sink) -> dict[int, float]:
    return {row.choice: array("f", row.fin.vector)[0] for row in sink.rows if row.fin is not None}


def test_a_lost_vector_is_sent_again_and_none_is_taken_twice() -> None:
    port = Port()
    judge = Judge(port)
    sink = opened(judge, choices=3)
    run = ended_run(3)
    rows = [run.append(choice, [], [], None, fin(choice)) for choice in (2, 0, 1)]
    frame(judge, rows[0])
    frame(judge, rows[2])  # the one between them is lost
    assert taken(sink) == {2: 2.0, 1: 1.0}
    assert run.complete
    frame(judge, *run.rows_since([0, 0, 0]))
    assert taken(sink) == {0: 0.0, 1: 1.0, 2: 2.0}
    assert len(sink.rows) == 3
    assert port.said[0] == ("answer", "w1", RunVerdict("q", 1, 7, "done"))
    assert sink.ended == [None]


def test_a_claim_tells_which_inputs_have_their_vectors() -> None:
    judge = Judge(Port())
    sink = opened(judge, choices=3)
    frame(judge, ended_run(3).append(1, [], [], None, fin(1)))
    reply = judge.on_claim(
        Claim(id="q", attempt=2, run=8, worker="w2"), 2.0, accounted=lambda worker: False, alive=lambda worker: True
    )
    assert (reply.verdict, reply.finished, reply.emitted) == ("go", [1], [[], [], []])
    run = ended_run(3)
    run.begin(reply.emitted, reply.finished)
    assert not run.complete
    for choice in (0, 2):
        row = run.append(choice, [], [], None, fin(choice))
        frame(judge, Row("q", 2, 8, choice, row.offset, [], [], None, row.fin), worker="w2")
    assert run.complete
    assert taken(sink) == {0: 0.0, 1: 1.0, 2: 2.0}
    assert sink.ended == [None]


def test_vectors_of_a_fenced_off_run_are_not_taken() -> None:
    port = Port()
    judge = Judge(port)
    sink = opened(judge, choices=2)
    frame(judge, ended_run(2).append(0, [], [], None, fin(0)))
    judge.on_claim(Claim(id="q", attempt=2, run=8, worker="w2"), 2.0, accounted=lambda worker: False, alive=lambda worker: True)
    frame(judge, ended_run(2).append(1, [], [], None, fin(1)))
    assert taken(sink) == {0: 0.0}
    assert port.said[-1][0] == "answer"
