"""Messages reach the stream once each and in order, whatever the connection does; failures show."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest
import structlog
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client import REGISTRY

from headrace.broker.codec import decode
from headrace.broker.messages.events import KvReset, KvStep
from headrace.broker.messages.members import WorkerMember
from headrace.broker.settings import Timing
from headrace.jetstream.errors import DiskFull, JetStreamError, PayloadTooLarge, PublishUnknown
from headrace.jetstream.ports import PubAck
from headrace.jetstream.subjects import Subjects
from headrace.workers.engine import EngineInfo
from headrace.workers.kv import publisher as subject
from headrace.workers.kv.publisher import HEADROOM, CacheEvents, KvPublisher, Outbox, RankPublishers, create_cache_events
from headrace.workers.kv.translator import CacheChange
from tests.support.router.kv_reader import KvReader


class FakeStream:
    """Keeps what is published; a repeat within its memory of ids is a duplicate."""

    def __init__(self) -> None:
        self.max_payload = 1 << 20
        self.errors: list[JetStreamError] = []  # raised one after the other
        self.stored_all_the_same = False  # what fails is stored nevertheless
        self.forgets_ids = False
        self.open = asyncio.Event()
        self.open.set()
        self.tries: list[str] = []
        self.ids: set[str] = set()
        self.messages: list[bytes] = []

    async def publish(self, to: str, data: bytes, *, msg_id: str, timeout_s: float) -> PubAck:
        assert to == "hr.kv.p.w"
        self.tries.append(msg_id)
        await self.open.wait()
        error = self.errors.pop(0) if self.errors else None
        if error is None or self.stored_all_the_same:
            if msg_id not in self.ids or self.forgets_ids:
                self.messages.append(data)
            self.ids.add(msg_id)
        if error is not None:
            raise error
        return PubAck("KV", len(self.messages))


class Bench:
    def __init__(self) -> None:
        self.stream = FakeStream()
        self.blocks: dict[str, set[int]] = {"device": set()}
        self.held = True
        self.publisher = KvPublisher(
            self.stream,  # type: ignore[arg-type]
            Subjects(),
            pool="p",
            worker="w",
            epoch=5,
            inventory=lambda: self.blocks,  # type: ignore[arg-type,return-value]
            timing=Timing(retry_s=0.001),
        )

    def store(self, *values: int) -> None:
        self.blocks["device"] |= set(values)
        self.publisher.step(CacheChange(stored={"device": list(values)}))

    def remove(self, *values: int) -> None:
        self.blocks["device"] -= set(values)
        self.publisher.step(CacheChange(removed={"device": list(values)}))

    @property
    def reader(self) -> KvReader:
        reader = KvReader()
        for message in self.stream.messages:
            reader.take(message)
        return reader

    async def until(self, condition) -> None:
        async with asyncio.timeout(5):
            while not condition():
                await asyncio.sleep(0.001)

    async def until_known(self) -> None:
        await self.until(
            lambda: self.stream.messages and self.reader.blocks and self.reader.of("device") == self.blocks["device"]
        )


@contextlib.asynccontextmanager
async def running() -> AsyncIterator[Bench]:
    bench = Bench()
    task = asyncio.create_task(bench.publisher.run(lambda: bench.held))
    try:
        yield bench
    finally:
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()


def sample(name: str, **labels: str) -> float:
    return REGISTRY.get_sample_value(name, labels) or 0.0


async def test_nothing_is_said_before_the_cache_is_known():
    async with running() as bench:
        await asyncio.sleep(0.02)
        assert not bench.stream.tries
        assert bench.publisher.state == "starting"
        bench.publisher.step(CacheChange())
        await bench.until(lambda: bench.stream.messages)
        assert bench.reader.next == 1
        assert bench.publisher.state == "ok"


async def test_the_first_message_has_what_was_cached_before():
    async with running() as bench:
        bench.store(1, 2)
        await bench.until_known()
        assert (bench.reader.next, bench.reader.steps) == (1, 1)


async def test_steps_are_merged_while_a_message_is_on_its_way():
    async with running() as bench:
        bench.store(0)
        await bench.until_known()
        bench.stream.open.clear()
        bench.store(1)
        await bench.until(lambda: len(bench.stream.tries) == 2)
        for value in range(2, 50):
            bench.store(value)
            bench.remove(value)
        bench.store(50)
        bench.stream.open.set()
        await bench.until_known()
        assert bench.reader.steps == 3


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("forgets", [False, True])
async def test_an_unknown_outcome_is_tried_again_under_the_same_id(stored, forgets):
    async with running() as bench:
        bench.stream.stored_all_the_same, bench.stream.forgets_ids = stored, forgets
        bench.stream.errors = [PublishUnknown(), PublishUnknown()]
        bench.store(1)
        await bench.until_known()
        bench.store(2)
        await bench.until_known()
        first, again, once_more, second = bench.stream.tries
        assert first == again == once_more
        assert (first.rpartition(".")[2], second.rpartition(".")[2]) == ("0", "1")
        async with running() as other:
            other.store(1)
            await other.until_known()
            assert other.stream.tries[0] not in (first, second), "no other worker knows what comes before the number"
        assert bench.reader.gaps == 0
        assert bench.reader.repeats == (2 if stored and forgets else 0)


async def test_a_failure_shows_in_the_state_the_metrics_and_the_log():
    before = sample("headrace_worker_kv_publish_failures_total", error="DiskFull")
    with structlog.testing.capture_logs() as logs:
        async with running() as bench:
            bench.stream.errors = [DiskFull("the disk is full")] * 50
            bench.store(1)
            await bench.until(lambda: bench.publisher.state == "failing: the disk is full")
            assert sample("headrace_worker_kv_ok", rank="0") == 0
            await bench.until_known()
            assert bench.publisher.state == "ok"
            assert sample("headrace_worker_kv_ok", rank="0") == 1
    assert sample("headrace_worker_kv_publish_failures_total", error="DiskFull") == before + 50
    assert [line["event"] for line in logs] == ["kv.publish_failed", "kv.publish_recovered"]  # once, not fifty times


async def test_what_can_never_be_stored_leaves_a_gap_and_a_reset():
    async with running() as bench:
        bench.store(0)
        await bench.until_known()
        bench.stream.errors = [PayloadTooLarge("too large")]
        bench.store(1)
        await bench.until_known()
        assert (bench.reader.gaps, bench.reader.resets) == (1, 1)
        bench.store(2)
        await bench.until_known()
        assert bench.reader.gaps == 1


async def test_without_the_lease_nothing_is_said_and_after_a_lapse_everything():
    async with running() as bench:
        bench.store(0)
        await bench.until_known()
        bench.held = False
        bench.publisher.lease_lapsed()
        bench.store(1)
        await asyncio.sleep(0.02)
        assert len(bench.stream.tries) == 1
        assert bench.publisher.state == "no lease"
        bench.held = True
        bench.publisher.lease_gained()
        await bench.until_known()
        assert (bench.reader.resets, bench.reader.gaps) == (1, 0)


async def test_a_lapse_in_the_middle_of_a_publish_keeps_its_number():
    async with running() as bench:
        bench.store(0)
        await bench.until_known()
        bench.stream.open.clear()
        bench.store(1)
        await bench.until(lambda: len(bench.stream.tries) == 2)
        bench.stream.errors = [PublishUnknown()]
        bench.held = False
        bench.publisher.lease_lapsed()
        bench.stream.open.set()
        await asyncio.sleep(0.02)
        assert len(bench.stream.messages) == 1
        bench.held = True
        bench.publisher.lease_gained()
        await bench.until_known()
        await bench.until(lambda: bench.reader.resets)
        assert bench.reader.gaps == 0


async def test_those_who_ask_within_a_second_share_a_dump(monkeypatch):
    monkeypatch.setattr(subject, "DUMP_EVERY_S", 0.2)
    async with running() as bench:
        bench.store(1)
        await bench.until_known()
        assert bench.publisher.ask_dump() == ""
        await bench.until(lambda: bench.reader.resets == 1)
        for _ in range(20):
            bench.publisher.ask_dump()
            bench.store(len(bench.blocks["device"]) + 1)
            await asyncio.sleep(0.001)
        assert bench.reader.resets == 1
        await bench.until(lambda: bench.reader.resets == 2)
        await bench.until_known()
        await asyncio.sleep(0.25)
        assert bench.reader.resets == 2


async def test_no_step_comes_between_the_parts_of_a_dump():
    async with running() as bench:
        bench.stream.max_payload = 1024 + 512 + 8 * 10
        bench.store(*range(95))
        await bench.until_known()
        bench.stream.open.clear()
        bench.publisher.ask_dump()
        await bench.until(lambda: len(bench.stream.tries) == 11)
        bench.store(200)
        bench.remove(1)
        bench.stream.open.set()
        await bench.until_known()
        assert bench.reader.resets == 1
        assert bench.reader.next == 10 + 10 + 1


def test_what_comes_and_goes_while_it_waits_is_not_told():
    outbox = Outbox(worker="w", epoch=1)
    outbox.merge(CacheChange(stored={"device": [1, 2]}))
    outbox.merge(CacheChange(removed={"device": [1]}))
    (message,) = outbox.seal({"device": {2}})
    step = decode(KvStep, message.data)
    assert (step.worker, step.epoch, step.n, step.cleared) == ("w", 1, 0, False)
    assert (step.removed, step.stored) == ({}, {"device": (2).to_bytes(8, "little")})
    assert not outbox


def test_many_changes_of_a_small_cache_become_its_inventory():
    outbox = Outbox(worker="w", epoch=1)
    outbox.merge(CacheChange(removed={"device": [*range(100)]}, stored={"host": [7]}))
    (message,) = outbox.seal({"device": set(), "host": {7}})
    step = decode(KvStep, message.data)
    assert (step.cleared, step.removed, list(step.stored)) == (True, {}, ["host"])


def test_the_first_message_of_an_epoch_may_say_that_nothing_is_there():
    (message,) = Outbox(worker="w", epoch=1).seal({})
    assert decode(KvStep, message.data) == KvStep(worker="w", epoch=1, n=0)


def test_messages_keep_to_the_size_they_may_have():
    outbox = Outbox(worker="w" * 64, epoch=2**63 - 1)
    values = {"device": set(range(2**63, 2**63 + 3000)), "host": set(range(2**62, 2**62 + 1000)), "disk": {5}}
    outbox.merge(CacheChange(stored={tier: list(v) for tier, v in values.items()}))
    most = HEADROOM + 8 * 1000
    steps = outbox.seal(values, max_bytes=most)
    parts = outbox.dump(values, max_bytes=most)
    assert [len(steps), len(parts)] == [5, 5]
    assert [message.n for message in (*steps, *parts)] == [*range(10)]
    assert max(len(message.data) for message in (*steps, *parts)) <= most
    resets = [decode(KvReset, part.data) for part in parts]
    assert [(reset.part, reset.last) for reset in resets] == [(n, n == 4) for n in range(5)]
    reader = KvReader()
    for message in (*steps, *parts):
        reader.take(message.data)
        if message.n == 4:
            assert reader.blocks == values
    assert reader.blocks == values
    assert reader.resets == 1


VALUES = st.integers(0, 12)


@settings(max_examples=100, deadline=None)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(["change", "change", "change", "clear", "seal", "dump"]),
            st.lists(st.tuples(st.sampled_from(["device", "host"]), VALUES), max_size=6),
        ),
        max_size=30,
    ),
    st.integers(1, 4),
)
def test_a_reader_of_all_messages_knows_what_the_engine_has(history, words):
    outbox, reader = Outbox(worker="w", epoch=9), KvReader()
    truth = {"device": set(), "host": set()}
    for what, touched in [*history, ("seal", [])]:
        if what in ("change", "clear"):
            change = CacheChange(cleared=what == "clear")
            if change.cleared:
                truth = {"device": set(), "host": set()}
            for tier, value in dict.fromkeys(touched):
                if value in truth[tier]:
                    if change.cleared:
                        continue
                    truth[tier].discard(value)
                    change.removed.setdefault(tier, []).append(value)
                else:
                    truth[tier].add(value)
                    change.stored.setdefault(tier, []).append(value)
            outbox.merge(change)
        elif what == "dump" or outbox or reader.epoch is None:
            make = outbox.dump if what == "dump" else outbox.seal
            for message in make(truth, max_bytes=HEADROOM + 8 * words):
                assert message.n == reader.next
                reader.take(message.data)
            assert {tier: reader.of(tier) for tier in truth} == truth
            assert not outbox


class Publisher:
    def __init__(self, state: str = "ok", why_not: str = "") -> None:
        self.state = state
        self.calls: list[str] = []
        self._why_not = why_not

    async def run(self, lease_held: Any) -> None:
        self.calls.append("run")
        await asyncio.Event().wait()

    def lease_gained(self) -> None:
        self.calls.append("gained")

    def lease_lapsed(self) -> None:
        self.calls.append("lapsed")

    def ask_dump(self) -> str:
        self.calls.append("dump")
        return self._why_not


def made(*publishers: Publisher) -> RankPublishers:
    return RankPublishers(publishers)  # type: ignore[arg-type]


async def test_every_rank_publishes_and_learns_of_the_lease_and_of_a_dump() -> None:
    ranks = [Publisher(), Publisher()]
    whole = made(*ranks)
    running = asyncio.create_task(whole.run(lambda: True))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    whole.lease_gained()
    whole.lease_lapsed()
    assert whole.ask_dump() == ""
    running.cancel()
    await asyncio.wait([running])
    assert [rank.calls for rank in ranks] == [["run", "gained", "lapsed", "dump"]] * 2


def test_the_first_rank_in_trouble_is_told() -> None:
    assert made(Publisher(), Publisher("failing: disk full")).state == "failing: disk full"
    assert made(Publisher(), Publisher()).state == "ok"
    assert made(Publisher(), Publisher(why_not="not yet")).ask_dump() == "not yet"


def info(**fields: Any) -> EngineInfo:
    return EngineInfo(
        engine="sim",
        version="1",
        tokenizer_dir="",
        context_length=1024,
        block_size=16,
        blocks=64,
        slots=4,
        vocab_size=100,
        eos_token_ids=(2,),
        **fields,
    )


def member(**fields: Any) -> WorkerMember:
    return WorkerMember(worker="w1", pool="p", model="m", block_size=16, **fields)


def created(about: EngineInfo, of: WorkerMember) -> CacheEvents:
    return create_cache_events(cast("Any", None), Subjects("hr"), cast("Any", None), about, of, pool_block=16)


async def test_an_engine_of_one_rank_has_one_publisher_and_one_feed() -> None:
    events = created(info(), member(kv_events=True))
    assert isinstance(events.port, KvPublisher)
    assert (len(events.feeds), len(events.caches), events.tiers()) == (1, 1, [0, 0, 0])


async def test_ranks_have_feeds_of_their_own_and_one_port() -> None:
    events = created(info(ranks=2), member(kv_events=True, ranks=2))
    assert isinstance(events.port, RankPublishers)
    assert (len(events.feeds), len(events.caches), events.tiers()) == (2, 2, [0, 0, 0])


@pytest.mark.parametrize(
    ("kinds", "role", "said"), [(("chat",), "aggregated", 1), (("embedding",), "aggregated", 0), (("chat",), "encode", 0)]
)
async def test_a_worker_without_events_has_no_parts_and_says_so_where_routers_would_count_on_them(
    kinds: tuple[str, ...], role: str, said: int
) -> None:
    with structlog.testing.capture_logs() as logs:
        events = created(info(kinds=kinds), member(role=role))
    assert (events.port, events.feeds, events.caches, events.tiers()) == (None, (), (), [])
    assert [entry["event"] for entry in logs] == ["worker.no_kv_events"] * said
