"""The real LeaseKeeper under every fault: never believed in longer than the server believes, and always regained.

HEADRACE_EVERY: as in `test_protocol.py`; these runs are short, so faults are tried at 29 times as many steps.
"""

import dataclasses
import os
from dataclasses import dataclass, field

import pytest

from headrace.jetstream import lease
from headrace.jetstream.lease import LeaseKeeper
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology
from tests.simulation.search import Scenario, assert_holds, assert_survives_every_step, play
from tests.simulation.virtual.faults import Fault
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM, SimConfig
from tests.simulation.virtual.world import Violation, World

TTL_S = 3.0
LOOK_S = 0.01
EVERY = max(1, int(os.environ.get("HEADRACE_EVERY", "29")) // 29)


@dataclass
class Holder:
    machine: Machine
    keeper: LeaseKeeper
    lapses: int = 0
    gains: int = 0


@dataclass
class Leases:
    """Processes that each keep a lease of their own, and some that contend for one."""

    world: World
    own: int
    rivals: int
    holders: dict[str, Holder] = field(default_factory=dict)

    def build(self) -> None:
        self.world.server.install(Topology(subjects=Subjects("hr")))
        for i in range(self.own):
            self.world.process(f"P{i}", self.keep, restart=True)
        for i in range(self.rivals):
            self.world.process(f"R{i}", self.keep, restart=True)
        self.world.at(0.0, self.look)

    async def keep(self, machine: Machine) -> None:
        key = "leader" if machine.name.startswith("R") else f"member.{machine.id}"
        holder: Holder

        def lapsed() -> None:
            holder.lapses += 1
            machine.note("lapses")

        def gained() -> None:
            holder.gains += 1
            machine.note("gains")
            if holder.gains > holder.lapses + 1:
                self.world.violation(f"{machine.id} gained its lease again without a lapse")

        keeper = LeaseKeeper(
            machine.messaging,
            "hr_members",
            key,
            machine.id.encode(),
            ttl_s=TTL_S,
            on_change=lambda held: gained() if held else lapsed(),
            contested=key == "leader",
        )
        holder = self.holders[machine.id] = Holder(machine, keeper)
        await keeper.run()

    def look(self) -> None:
        store = self.world.server.buckets["hr_members"]
        leaders = []
        for name, holder in self.holders.items():
            if not holder.machine.alive or holder.machine.frozen:
                continue
            entry = store.get(holder.keeper.key)
            there = entry is not None and entry.value == name.encode()
            if holder.keeper.held_until_s > self.world.now:
                # A restarted server has forgotten the lease. Nobody gives a verdict on what a young bucket does not have.
                if not there and store.age_s() >= TTL_S:
                    self.world.violation(f"{name} believes in a lease that is gone")
                if holder.keeper.key == "leader":
                    leaders.append(name)
        if len(leaders) > 1:
            self.world.violation(f"two leaders: {leaders}")
        self.world.at(LOOK_S, self.look)

    def leftovers(self) -> list[str]:
        soon = self.world.now + TTL_S / 3
        held = {h.keeper.key for h in self.holders.values() if h.machine.alive and h.keeper.held_until_s > soon}
        missing = [f"{m.id} without lease" for m in self.world.living("P") if f"member.{m.id}" not in held]
        return missing + ["no leader"] * (self.rivals > 0 and "leader" not in held)

    def verify(self) -> None:
        if self.world.server.up and not self.holders:
            raise Violation("nobody ran")


def scenario(config: SimConfig, *, own: int = 2, rivals: int = 2) -> Scenario:
    def build(world: World) -> Leases:
        leases = Leases(world, own, rivals)
        leases.build()
        return leases

    victims = [f"P{i}" for i in range(own)] + [f"R{i}" for i in range(rivals)]
    return Scenario(name="leases", build=build, config=config, victims=victims, faults=8, until_s=40.0)


@pytest.mark.slow
def test_a_lease_is_never_believed_in_longer_than_it_lives():
    assert assert_holds(scenario(SimConfig(noise=0.1)), range(40)) > 5000


@pytest.mark.parametrize("kind", ["crash", "powercut", "freeze", "cut", "gap", "outage"])
def test_a_lease_survives_a_fault_at_any_step(kind):
    few = Scenario(name="leases", build=scenario(CALM, own=1, rivals=2).build, config=CALM, until_s=40.0)
    assert assert_survives_every_step(few, kinds=[kind], every=EVERY) > 5


@pytest.mark.parametrize("length_s", [0.3, 1.0])
def test_a_server_that_forgets_all_leases_and_is_back_soon_costs_none(length_s: float) -> None:
    found = []
    calm = scenario(CALM, own=2, rivals=0)

    def build(world: World) -> Leases:
        found.append(calm.build(world))
        return found[-1]

    outcome = play(dataclasses.replace(calm, build=build), 1, faults=[Fault(6.0, "outage", "", length_s)], tracing=True)
    assert any("server is back" in line for line in outcome.story)
    assert outcome.error is None
    assert [(holder.gains, holder.lapses) for holder in found[-1].holders.values()] == [(1, 0)] * 2


@pytest.mark.parametrize("way_s", [0.3, 0.4, 0.6])
def test_a_lease_is_kept_where_each_answer_takes_a_good_part_of_its_ttl(way_s: float) -> None:
    """Calls are given a quarter of the TTL at first, 0.75 s."""
    assert kept_over(way_s) == [(1, 0)] * 2


def test_without_more_time_for_slow_calls_it_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "SLOW_CALLS_PER_TTL", lease.CALLS_PER_TTL)
    assert kept_over(0.4) != [(1, 0)] * 2


def kept_over(way_s: float) -> list[tuple[int, int]]:
    """Keep two leases for 30 s over a network whose ways take so long each, and return their gains and lapses."""
    found = []
    far = SimConfig(delays_s=(way_s,), noise=0.0, silent=0.0, watch_lags_s=(0.0,), quiet_at_s=30.0)
    calm = scenario(far, own=2, rivals=0)

    def build(world: World) -> Leases:
        found.append(calm.build(world))
        return found[-1]

    # A fault that hurts no process: the run lasts until the network is quiet.
    play(dataclasses.replace(calm, build=build), 1, faults=[Fault(29.0, "gap", "nobody")])
    return [(holder.gains, holder.lapses) for holder in found[-1].holders.values()]


def test_without_the_wait_for_a_young_bucket_two_lead(monkeypatch: pytest.MonkeyPatch) -> None:
    async def never(_self: LeaseKeeper) -> bool:
        return False

    monkeypatch.setattr(LeaseKeeper, "_young", never)
    with pytest.raises(AssertionError, match="two leaders"):
        assert_holds(scenario(SimConfig(noise=0.1)), range(40))
