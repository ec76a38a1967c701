"""Leases as a state machine: real keepers, the server's bucket, and a network that holds back, loses and delays every write.

A holder that freezes, a revocation by a process that believes it dead, a rival for the same key and a server that is restarted
and has forgotten everything are part of it. What must hold: no process believes in a lease that the server has not (but for one
TTL after a restart), two never believe in the same one, and every lapse is told once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any, cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from headrace.jetstream.errors import JetStreamError, RequestTimeout, RevisionConflict
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.ports import Entry, Messaging
from tests.simulation.virtual.loop import Scheduler, VirtualLoop

TTL_S = 4.0
KEY = "leader"


@dataclass(eq=False)
class Call:
    """A request on its way. It reaches the server or not, and then its answer comes or not."""

    owner: int
    op: str
    args: dict[str, Any]
    future: asyncio.Future[Any]
    outcome: Any = None
    arrived: bool = False


@dataclass
class Server:
    """One key with a TTL, compare-and-set, kept in memory."""

    now: float = 0.0
    revision: int = 0
    entry: Entry | None = None
    expires: float = 0.0
    marked: bool = False  # the key is absent and its marker is there
    made: float = -TTL_S

    def restart(self) -> None:
        self.revision, self.entry, self.marked, self.made = 0, None, False, self.now

    def look(self) -> Entry | None:
        if self.entry is not None and self.now >= self.expires:
            self.entry, self.marked = None, True
            self.revision += 1  # the marker
        return self.entry

    def do(self, op: str, value: bytes = b"", revision: int = 0, unmarked: bool = False) -> Any:
        there = self.look()
        if op == "get":
            return there
        if op == "age":
            return self.now - self.made
        if unmarked and self.marked:
            return RevisionConflict("there is a marker")
        if (op == "create" and there is not None) or (op != "create" and (there is None or there.revision != revision)):
            return RevisionConflict("somebody else was first")
        self.revision += 1
        if op == "delete":
            self.entry, self.marked = None, True
            return None
        self.entry, self.expires, self.marked = Entry(KEY, value, self.revision), self.now + TTL_S, False
        return self.revision


@dataclass
class Bucket:
    """What a keeper sees of it: calls that wait until the test lets them through."""

    owner: int
    loop: VirtualLoop
    calls: list[Call]

    async def _call(self, op: str, **args: Any) -> Any:
        call = Call(self.owner, op, args, self.loop.create_future())
        self.calls.append(call)
        return await call.future

    async def get(self, key: str) -> Entry | None:
        return cast("Entry | None", await self._call("get"))

    async def age_s(self) -> float:
        return cast("float", await self._call("age"))

    async def create(self, key: str, value: bytes, *, ttl_s: float | None = None, unmarked: bool = False) -> int:
        return cast("int", await self._call("create", value=value, unmarked=unmarked))

    async def update(self, key: str, value: bytes, *, revision: int, ttl_s: float | None = None) -> int:
        return cast("int", await self._call("update", value=value, revision=revision))

    async def delete(self, key: str, *, revision: int | None = None) -> None:
        await self._call("delete", revision=revision or 0)


class Holder:
    """One process that wants the lease."""

    def __init__(self, number: int, scheduler: Scheduler) -> None:
        self.name = f"h{number}".encode()
        self.loop = VirtualLoop(scheduler, f"h{number}")
        self.calls: list[Call] = []
        self._bucket = Bucket(number, self.loop, self.calls)
        self.gains = self.lapses = 0
        self.reconnected: Callable[[], Awaitable[None]]
        self.keeper: LeaseKeeper
        self.loop.call_soon(self._start)

    def _start(self) -> None:
        self.keeper = LeaseKeeper(
            cast("Messaging", self),
            "members",
            KEY,
            self.name,
            ttl_s=TTL_S,
            on_change=lambda held: self._gained() if held else self._lapsed(),
            contested=True,
        )
        self.loop.create_task(self.keeper.run())

    def bucket(self, _name: str) -> Bucket:
        return self._bucket

    def on_reconnect(self, callback: Callable[[], Awaitable[None]]) -> Callable[[], None]:
        self.reconnected = callback
        return lambda: None

    def _gained(self) -> None:
        self.gains += 1

    def _lapsed(self) -> None:
        self.lapses += 1


class World(RuleBasedStateMachine):
    """Two holders, one key."""

    @initialize()
    def begin(self) -> None:
        self.scheduler = Scheduler(0)
        self.server = Server()
        self.holders = [Holder(n, self.scheduler) for n in range(2)]
        self.forgotten_until_s = 0.0
        self.disputed_until_s = 0.0  # the lease was taken from somebody who may believe in it until then
        self._run(0.0)

    def _run(self, for_s: float) -> None:
        self.scheduler.advance(self.scheduler.now + for_s)
        self.server.now = self.scheduler.now
        self.server.look()

    def _waiting(self, *, arrived: bool) -> list[Call]:
        return [call for holder in self.holders for call in holder.calls if call.arrived is arrived]

    def _answer(self, call: Call, outcome: Any) -> None:
        holder = self.holders[call.owner]
        holder.calls.remove(call)

        def settle() -> None:
            if call.future.done():
                return
            if isinstance(outcome, JetStreamError):
                call.future.set_exception(outcome)
            else:
                call.future.set_result(outcome)

        holder.loop.call_soon(settle)
        self._run(0.0)

    def _arrive(self, call: Call) -> None:
        call.outcome, call.arrived = self.server.do(call.op, **call.args), True

    # -- what happens ------------------------------------------------------------------------------------------------

    @rule(for_s=st.sampled_from([0.01, 0.1, 0.3, 0.9, 1.4, 4.1]))
    def time_passes(self, for_s: float) -> None:
        self._run(for_s)

    @precondition(lambda self: self._waiting(arrived=False))
    @rule(which=st.integers(0, 15))
    def a_call_works_at_once(self, which: int) -> None:
        calls = self._waiting(arrived=False)
        call = calls[which % len(calls)]
        self._arrive(call)
        self._answer(call, call.outcome)

    @precondition(lambda self: self._waiting(arrived=False))
    @rule(which=st.integers(0, 15))
    def a_call_arrives(self, which: int) -> None:
        """Perhaps long after whoever made it has given up."""
        calls = self._waiting(arrived=False)
        self._arrive(calls[which % len(calls)])

    @precondition(lambda self: self._waiting(arrived=True))
    @rule(which=st.integers(0, 15))
    def an_answer_comes(self, which: int) -> None:
        calls = self._waiting(arrived=True)
        call = calls[which % len(calls)]
        self._answer(call, call.outcome)

    @precondition(lambda self: self._waiting(arrived=False) + self._waiting(arrived=True))
    @rule(which=st.integers(0, 15))
    def it_is_lost(self, which: int) -> None:
        """The question or the answer: nobody can tell."""
        calls = self._waiting(arrived=False) + self._waiting(arrived=True)
        self._answer(calls[which % len(calls)], RequestTimeout("no answer"))

    @rule(who=st.integers(0, 1))
    def freeze_or_thaw(self, who: int) -> None:
        loop = self.holders[who].loop
        if loop.paused:
            loop.resume()
        else:
            loop.pause()
        self._run(0.0)

    @precondition(lambda self: self.server.entry is not None)
    @rule()
    def somebody_takes_it_away(self) -> None:
        """A prober, or a supervisor, that believes its holder dead, by compare-and-set."""
        if (entry := self.server.look()) is not None:
            self.disputed_until_s = self.server.expires
            self.server.do("delete", revision=entry.revision)

    @rule()
    def the_server_is_restarted(self) -> None:
        """It has forgotten the key. The questions and answers that were on their way are repeated, or are still to come."""
        self.server.restart()
        self.forgotten_until_s = self.server.now + TTL_S
        for holder in self.holders:
            holder.loop.create_task(holder.reconnected())
        self._run(0.0)

    # -- what must hold ----------------------------------------------------------------------------------------------

    def _believers(self) -> list[Holder]:
        return [h for h in self.holders if not h.loop.paused and h.keeper.held_until_s > self.scheduler.now]

    @invariant()
    def nobody_believes_in_a_lease_that_the_server_has_not(self) -> None:
        if not hasattr(self, "holders") or self.scheduler.now < self.disputed_until_s:
            return
        for holder in self._believers():
            entry = self.server.look()
            if entry is None and self.scheduler.now < self.forgotten_until_s:
                continue
            assert entry is not None
            if entry.value != holder.name and self.scheduler.now < self.forgotten_until_s:
                continue  # a rival has written it, and does not believe in it while the bucket is young
            assert entry.value == holder.name
            assert holder.keeper.held_until_s <= self.server.expires

    @invariant()
    def two_never_believe_in_it(self) -> None:
        if hasattr(self, "holders") and self.scheduler.now >= self.disputed_until_s:
            assert len(self._believers()) <= 1

    @invariant()
    def a_lapse_is_told_once_for_each_gain(self) -> None:
        for holder in getattr(self, "holders", ()):
            if holder.loop.paused:
                continue
            assert holder.gains - holder.lapses in (0, 1)

    def teardown(self) -> None:
        """Once the network is well, somebody has it within two leases."""
        if not hasattr(self, "holders"):
            return
        for holder in self.holders:
            holder.loop.resume()
        for _ in range(int(3 * TTL_S / 0.1)):
            self._run(0.1)
            for call in self._waiting(arrived=False):
                self._arrive(call)
            for call in self._waiting(arrived=True):
                self._answer(call, call.outcome)
        assert len(self._believers()) == 1
        for holder in self.holders:
            holder.loop.bury()


World.TestCase.settings = settings(max_examples=60, stateful_step_count=40, deadline=None, derandomize=True)
TestLease = World.TestCase


# -- a slow server ---------------------------------------------------------------------------------------------------------


class SlowServer:
    """Each call takes `trip_s` there and back; the answer to the first one is lost."""

    def __init__(self, trip_s: float) -> None:
        self.trip_s = trip_s
        self.scheduler = Scheduler(0)
        self.server = Server()
        self.holder = Holder(0, self.scheduler)
        self._lost = False

    def run(self, for_s: float) -> None:
        """In small steps: what was asked is taken half a trip later, and answered another half after that."""
        for _ in range(round(for_s / 0.01)):
            self.scheduler.advance(self.scheduler.now + 0.01)
            self.server.now = self.scheduler.now
            for call in list(self.holder.calls):
                self.holder.calls.remove(call)
                self.scheduler.at(self.trip_s / 2, self._arrive, call)

    def _arrive(self, call: Call) -> None:
        self.server.now = self.scheduler.now
        outcome = self.server.do(call.op, **call.args)
        if self._lost:
            self.scheduler.at(self.trip_s / 2, self._answer, call, outcome)
        self._lost = True

    def _answer(self, call: Call, outcome: Any) -> None:
        def settle() -> None:
            if call.future.done():  # it has been given up
                return
            if isinstance(outcome, JetStreamError):
                call.future.set_exception(outcome)
            else:
                call.future.set_result(outcome)

        self.holder.loop.call_soon(settle)


def test_a_slow_server_keeps_nobody_from_its_lease() -> None:
    """Three calls find one's own write and go on from it: each may take a quarter of the lease, not all together."""
    slow = SlowServer(trip_s=0.7 * TTL_S / 4)
    slow.run(0.95 * TTL_S)
    assert slow.holder.gains == 1
    assert slow.holder.keeper.held_until_s > slow.server.now + TTL_S / 2
    for _ in range(5):
        slow.run(TTL_S)
        assert (slow.server.entry is not None, slow.holder.gains, slow.holder.lapses) == (True, 1, 0)
    slow.holder.loop.bury()
