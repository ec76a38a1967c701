"""Faults of the simulated world: what they stop, what they lose, what they keep."""

import asyncio
import gc
from itertools import pairwise

import pytest

from headrace.jetstream.errors import NoResponder, NotConnected, PublishUnknown, RequestTimeout
from headrace.jetstream.ports import ConsumerSpec
from headrace.jetstream.specs import StreamSpec
from tests.simulation.virtual.faults import Fault
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM, SimConfig
from tests.simulation.virtual.world import Violation, World

WORK = StreamSpec(name="WORK", subjects=("work.>",), description="", retention="workqueue", discard="new")
READER = ConsumerSpec(stream="WORK", name="R", filter_subjects=("work.>",), ack_wait_s=2.0)


def world(seed=1, config=CALM, **options):
    made = World(seed, config, **options)
    made.server.add_stream(WORK)
    made.server.stream("WORK").ensure_consumer(READER)
    made.server.add_bucket("kv")
    return made


async def sends_every_100_ms(machine: Machine):
    n = 0
    while True:
        machine.messaging.send("ticks", str(n).encode())
        n += 1
        await asyncio.sleep(0.1)


def listener(into):
    async def main(machine: Machine):
        await machine.messaging.subscribe("ticks", lambda m: into.append((round(machine.loop.time(), 1), int(m.data))))
        await asyncio.Event().wait()

    return main


def test_a_crash_runs_no_cleanup_and_a_restart_is_a_new_incarnation():
    log = []

    async def main(machine: Machine):
        log.append(machine.id)
        try:
            await asyncio.sleep(1000)
        finally:
            if machine.alive:
                log.append("cleanup with effect")
            machine.messaging.send("ticks", b"1")

    ticks = []
    with world() as w:
        w.process("L", listener(ticks))
        w.process("P", main, restart=True)
        w.schedule([Fault(5.0, "crash", "P")])
        w.run(50.0)
    gc.collect()
    assert log == ["P-0", "P-1"]
    assert ticks == []


def test_a_crash_inside_a_callback_drops_what_follows_in_it():
    ticks = []

    async def main(machine: Machine):
        machine.messaging.send("ticks", b"1")
        machine.crash()
        machine.messaging.send("ticks", b"2")

    with world() as w:
        w.process("L", listener(ticks))
        w.at(1.0, w._spawn, "P", _plan(main))
        w.run(5.0)
    assert [n for _, n in ticks] == [1]


def _plan(main):
    from tests.simulation.virtual.machine import Plan

    return Plan(main, restart=False, restart_on_exit=False)


def test_a_frozen_process_sends_and_hears_nothing_and_catches_up_when_it_thaws():
    ticks, late = [], []
    with world() as w:
        w.process("T", sends_every_100_ms)
        w.process("L", listener(ticks))
        w.process("F", listener(late))
        w.schedule([Fault(1.05, "freeze", "T", 2.0), Fault(5.05, "freeze", "F", 3.0)])
        w.run(10.0)
    times = [t for t, _ in ticks]
    assert max(b - a for a, b in pairwise(times)) == pytest.approx(2.0, abs=0.11)
    assert [n for _, n in late] == list(range(len(late)))  # nothing lost
    assert sum(t == 8.0 or t == 8.1 for t, _ in late) >= 29  # all at once


def test_a_fault_at_a_hop_hits_between_two_sends_of_one_callback():
    def heard(kind):
        ticks = []

        async def main(machine: Machine):
            for n in range(4):
                machine.messaging.send("ticks", str(n).encode())

        with world(inject={3: kind}) as w:  # hop 1 is the subscription
            w.process("L", listener(ticks))
            w.at(1.0, w._spawn, "P", _plan(main))
            w.run(20.0)
        return ticks

    assert [n for _, n in heard("crash")] == [0]
    assert [n for _, n in heard("powercut")] == []  # the first was still on its way
    frozen = heard("freeze")
    assert [n for _, n in frozen] == [0, 1, 2, 3]
    assert frozen[0][0] == 1.0
    assert frozen[1][0] >= 2.0


def test_a_cut_process_notices_reconnects_and_misses_core_messages():
    ticks, events = [], []

    async def main(machine: Machine):
        m = machine.messaging

        async def back():
            events.append(("back", machine.loop.time()))

        m.on_reconnect(back)
        await m.subscribe("ticks", lambda x: ticks.append(int(x.data)))
        await asyncio.sleep(2.0)
        assert not m.connected
        with pytest.raises(NotConnected):
            await m.request("anything", b"", timeout_s=1.0)
        with pytest.raises(PublishUnknown):
            await m.publish("work.a", b"", timeout_s=0.5)
        ack = await m.publish("work.a", b"", msg_id="1", timeout_s=10.0)  # waits for the connection
        assert ack.seq == 1
        assert m.connected
        assert m.connected_since_s > 3.0
        await asyncio.Event().wait()

    with world() as w:
        w.process("T", sends_every_100_ms)
        w.process("C", main)
        w.schedule([Fault(1.05, "cut", "C", 2.0)])
        w.run(10.0)
    assert len(events) == 1
    missing = set(range(max(ticks))) - set(ticks)
    assert missing == set(range(min(missing), max(missing) + 1))
    assert 19 <= len(missing) <= 24


def test_a_request_to_nobody_fails_at_once_and_one_to_a_frozen_process_times_out():
    outcome = []

    async def answers(machine: Machine):
        m = machine.messaging
        await m.subscribe("ask", lambda x: m.send(x.reply, x.data + b"!"))
        await asyncio.Event().wait()

    async def asks(machine: Machine):
        await asyncio.sleep(0.5)
        outcome.append(await machine.messaging.request("ask", b"hi", timeout_s=1.0))
        with pytest.raises(NoResponder):
            await machine.messaging.request("nobody", b"", timeout_s=1.0)
        assert machine.loop.time() < 0.6
        await asyncio.sleep(1.0)
        with pytest.raises(RequestTimeout):
            await machine.messaging.request("ask", b"hi", timeout_s=1.0)
        await asyncio.sleep(3.0)
        with pytest.raises(NoResponder):
            await machine.messaging.request("ask", b"hi", timeout_s=1.0)
        outcome.append("done")

    with world() as w:
        w.process("A", answers)
        w.process("Q", asks)
        w.schedule([Fault(1.0, "freeze", "A", 3.0), Fault(5.0, "crash", "A")])
        w.run(20.0)
    assert outcome == [b"hi!", "done"]


def test_what_was_delivered_into_a_dead_connection_comes_back_after_ack_wait():
    got = []

    async def reads(machine: Machine):
        loop = machine.messaging.pull(
            "WORK", "R", lambda d: got.append((machine.id, d.num_delivered, machine.loop.time())), credit=5
        )
        await loop.run()

    async def writes(machine: Machine):
        await asyncio.sleep(1.0)
        await machine.messaging.publish("work.a", b"x")

    with world() as w:
        w.process("P", reads, restart=True)
        w.process("Q", writes)
        w.schedule([Fault(2.0, "crash", "P")])
        w.run(10.0)
    assert [(who, n) for who, n, _ in got[:2]] == [("P-0", 1), ("P-1", 2)]
    assert got[1][2] >= 3.0


def test_an_outage_keeps_files_forgets_ids_of_removed_messages_and_lets_leases_expire():
    seen = []

    async def main(machine: Machine):
        m = machine.messaging
        bucket = m.bucket("kv")
        await bucket.create("lease", b"", ttl_s=3)
        first = await m.publish("work.a", b"1", msg_id="a")
        kept = await m.publish("work.b", b"2", msg_id="b")
        assert await m.delete_message("WORK", first.seq)
        await asyncio.sleep(8.0)
        assert m.connected
        assert (await m.publish("work.a", b"1", msg_id="a")).duplicate is False
        assert (await m.publish("work.b", b"2", msg_id="b")).duplicate is True
        assert (await m.get_message("WORK", kept.seq)).data == b"2"
        assert await bucket.get("lease") is None
        seen.append("done")

    with world() as w:
        w.process("P", main)
        w.schedule([Fault(2.0, "outage", "", 4.0)])
        w.run(20.0)
    assert seen == ["done"]


def test_a_holder_may_count_on_a_lease_that_only_a_restart_has_forgotten_until_its_ttl_is_over():
    seen = {}

    async def main(machine: Machine):
        bucket = machine.messaging.bucket("memory")
        await bucket.create("lease", b"", ttl_s=3)
        await bucket.create("given up", b"", ttl_s=3)
        await bucket.delete("given up")
        await asyncio.Event().wait()

    def look():
        seen[round(w.now, 1)] = tuple(map(store.leased, ("lease", "given up", "never there")))

    with world() as w:
        w.server.add_bucket("memory", in_memory=True)
        store = w.server.buckets["memory"]
        w.process("P", main)
        w.schedule([Fault(1.0, "outage", "", 1.0)])
        for at_s in (0.9, 2.5, 3.5):
            w.at(at_s, look)
        w.run(5.0)
    assert seen == {0.9: (True, False, False), 2.5: (True, False, False), 3.5: (False, False, False)}


def test_noise_loses_delays_and_doubles_until_the_quiet_time_and_keeps_the_order_of_a_pair():
    ticks = []
    with world(3, SimConfig(noise=0.2, quiet_at_s=10.0, silent=0.0)) as w:
        w.process("T", sends_every_100_ms)
        w.process("L", listener(ticks))
        w.run(30.0)
    noisy = [n for _, n in ticks if n < 80]
    assert len(set(noisy)) < 78  # some lost
    assert len(noisy) > len(set(noisy))  # some twice
    calm = [n for _, n in ticks if n > 130]
    assert calm == list(range(131, max(calm) + 1))


def test_the_same_seed_gives_the_same_run_hop_for_hop():
    def trace(seed):
        with world(seed, SimConfig(noise=0.1), tracing=True) as w:
            w.process("T", sends_every_100_ms, restart=True)
            w.process("L", listener([]), restart=True)
            w.schedule(w.random_faults(6, ["crash", "freeze", "cut", "gap", "outage"], ["T", "L"]))
            w.run(30.0)
            return list(w.trace), w.steps

    assert trace(4) == trace(4)
    assert trace(4) != trace(5)


def test_a_violation_noted_inside_a_process_ends_the_run():
    async def main(machine: Machine):
        machine.world.violation("two ends of q1")
        await asyncio.sleep(100)

    with world() as w:
        w.process("P", main)
        with pytest.raises(Violation, match="two ends"):
            w.run(10.0)
        assert w.now < 1.0
