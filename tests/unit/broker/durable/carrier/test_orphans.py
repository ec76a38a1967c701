"""The jobs of an ingress that is gone: each that nobody holds is taken over by one of the others, and no other job is."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.codec import decode, encode
from headrace.broker.durable import intake
from headrace.broker.durable.held_job import HeldJobs
from headrace.broker.durable.intake import Orphans
from headrace.broker.messages.control import Done, IngressControl
from headrace.broker.messages.durable import HEADER_JOB
from headrace.jetstream.errors import NoResponder, RequestTimeout
from headrace.jetstream.ports import Delivery, StoredMessage, Unacked
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.tasks import TaskScope
from tests.unit.broker.durable.carrier.test_held_job import held

SUBJECTS = Subjects("hr")


class Living:
    """A carrier that is there. `taken`: the sequences that it was given."""

    def __init__(self, world: World, name: str) -> None:
        self.held = HeldJobs()
        self.taken: list[int] = []
        self.deliveries: list[Delivery] = []
        self.changed: Callable[[], None] = lambda: None
        self.tasks = TaskScope()
        members = SimpleNamespace(ingresses=lambda: list(world.ingresses), on_change=self._on_change)
        ingress = SimpleNamespace(id=name, lease_held=True, members=members, judge_gone=world.judge_gone)
        settings = SimpleNamespace(timing=SimpleNamespace(rpc_timeout_s=1.0))
        deps: Any = SimpleNamespace(messaging=world, subjects=SUBJECTS, ingress=ingress, settings=settings)
        self.orphans = Orphans(deps, self.held, self.tasks, lambda: ["m"], self._take)

    def _on_change(self, changed: Callable[[], None]) -> None:
        self.changed = changed

    def _take(self, model: str, delivery: Delivery) -> None:
        assert (model, delivery.num_delivered) == ("m", 2)
        self.taken.append(delivery.stream_seq)
        self.deliveries.append(delivery)


class World:
    """A queue with jobs that are out, and those who may hold them."""

    def __init__(self, jobs: set[int], last: int) -> None:
        self.jobs = jobs
        self.last = last
        self.ingresses = ["a", "b", "dead"]
        self.gone = True
        self.silent = False
        self.asked = 0
        self.living = {name: Living(self, name) for name in ("a", "b")}

    async def judge_gone(self, ingress: str) -> bool:
        return self.gone and ingress == "dead"

    async def unacked(self, stream: str, consumer: str) -> Unacked:
        assert (stream, consumer) == ("HR_JOB", SUBJECTS.job_consumer("m"))
        self.asked += 1
        out = [seq for seq in self.jobs if seq <= self.last]
        return Unacked(min(out, default=self.last + 1) - 1, self.last, len(out))

    async def subject_messages(self, stream: str, subject: str, *, limit: int, start_seq: int) -> list[StoredMessage]:
        found = sorted(seq for seq in self.jobs if seq >= start_seq)[:limit]
        return [StoredMessage(SUBJECTS.job("m", "t"), seq, b"{}", {HEADER_JOB: f"j{seq}"}) for seq in found]

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        if self.silent:
            raise NoResponder("nobody")
        question = decode(IngressControl, data)  # type: ignore[arg-type]
        other = next(carrier for name, carrier in self.living.items() if subject == SUBJECTS.judge(name))
        assert question.nonce == ""
        return encode(Done(ok=bool(other.held.of(question.job))))

    async def delete_message(self, stream: str, seq: int) -> bool:
        self.jobs.discard(seq)
        return True

    async def dies(self) -> None:
        """Let the lease of the dead one end, and wait until the others have done what they do then."""
        for carrier in self.living.values():
            carrier.changed()  # they know it
        self.ingresses.remove("dead")
        for carrier in self.living.values():
            async with carrier.tasks:
                carrier.changed()


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intake, "ARRIVING_S", 0.0)
    monkeypatch.setattr(intake, "ORPHANS_PER_READ", 7)


@given(st.sets(st.integers(1, 60)), st.dictionaries(st.integers(1, 60), st.sampled_from("ab")), st.integers(0, 60))
def test_each_is_taken_by_one_and_nothing_that_is_held_or_was_never_out(
    jobs: set[int], holders: dict[int, str], last: int
) -> None:
    async def scene() -> None:
        world = World(jobs | holders.keys(), last)
        for seq, name in holders.items():
            world.living[name].held.add(held(seq, f"j{seq}"))
        await world.dies()
        a, b = world.living["a"].taken, world.living["b"].taken
        assert sorted(a + b) == sorted(seq for seq in jobs - holders.keys() if seq <= last)

    asyncio.run(scene())


async def test_nothing_is_taken_while_one_of_the_others_does_not_answer_or_the_death_is_not_known() -> None:
    for silent, gone in ((True, True), (False, False)):
        world = World({1, 2, 3}, 3)
        world.silent, world.gone = silent, gone
        await world.dies()
        assert world.living["a"].taken == world.living["b"].taken == []
        assert world.asked == (2 if gone else 0)


async def test_a_server_that_does_not_answer_leaves_them_to_their_ack_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World({1, 2, 3}, 3)

    async def unacked(stream: str, consumer: str) -> Unacked:
        raise RequestTimeout("no answer")

    monkeypatch.setattr(world, "unacked", unacked)
    await world.dies()
    assert world.living["a"].taken == world.living["b"].taken == []


async def test_the_ack_of_one_that_was_taken_over_removes_it() -> None:
    world = World({1, 2, 3}, 3)
    await world.dies()
    for carrier in world.living.values():
        async with carrier.tasks:
            for delivery in carrier.deliveries:
                delivery.progress()
                delivery.nak()
                assert delivery.stream_seq in world.jobs
                delivery.ack()
    assert world.jobs == set()
