"""The search finds the textbook mistake and passes the textbook protocol."""

import asyncio
import dataclasses
from dataclasses import dataclass, field

import pytest

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import ConsumerSpec
from headrace.jetstream.specs import StreamSpec
from tests.simulation.search import Scenario, assert_holds, assert_survives_every_step, explain, minimise, play
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM, SimConfig
from tests.simulation.virtual.world import Violation, World

JOBS = 3


@dataclass
class Jobs:
    """A writer publishes jobs, a worker does them; every job must be done at least once."""

    world: World
    ack_first: bool
    published: set[int] = field(default_factory=set)
    done: list[int] = field(default_factory=list)

    async def writer(self, machine: Machine) -> None:
        for job in range(JOBS):
            while job not in self.published:
                try:
                    await machine.messaging.publish("work.a", b"%d" % job, msg_id=str(job))
                except JetStreamError:
                    await asyncio.sleep(0.1)
                else:
                    self.published.add(job)
        await asyncio.Event().wait()

    async def worker(self, machine: Machine) -> None:
        queue: asyncio.Queue = asyncio.Queue()
        pull = machine.messaging.pull("WORK", "R", queue.put_nowait, credit=1)

        async def work() -> None:
            while True:
                delivery = await queue.get()
                if self.ack_first:
                    delivery.ack()
                await asyncio.sleep(0.2)
                self.done.append(int(delivery.data))
                if not self.ack_first:
                    delivery.ack()
                pull.add_credit(1)

        async with asyncio.TaskGroup() as group:
            group.create_task(pull.run())
            group.create_task(work())

    def leftovers(self) -> list[str]:
        waiting = [f"job {seq}" for seq in self.world.server.stream("WORK").messages]
        return waiting + ["publishing"] * (len(self.published) < JOBS) + ["time to finish"] * (self.world.now < 8.0)

    def verify(self) -> None:
        if missing := self.published - set(self.done):
            raise Violation(f"not done: {missing}")


def scenario(*, ack_first: bool, config: SimConfig = CALM, **options) -> Scenario:
    def build(world: World) -> Jobs:
        jobs = Jobs(world, ack_first)
        world.server.add_stream(
            StreamSpec(name="WORK", subjects=("work.>",), description="", retention="workqueue", discard="new")
        )
        world.server.stream("WORK").ensure_consumer(ConsumerSpec(stream="WORK", name="R", filter_subjects=("work.>",)))
        world.process("writer", jobs.writer, restart=True)
        world.process("worker", jobs.worker, restart=True)
        return jobs

    return Scenario(name="jobs", build=build, config=config, victims=("worker", "writer"), **options)


def test_one_crash_at_every_step_finds_an_ack_before_the_work_and_tells_how():
    with pytest.raises(AssertionError, match="not done") as caught:
        assert_survives_every_step(scenario(ack_first=True), kinds=["crash", "crash+"])
    assert "FAULT crash worker-0" in str(caught.value)
    assert "inject={" in str(caught.value)


@pytest.mark.parametrize("kind", ["crash", "powercut", "freeze", "cut", "outage"])
def test_an_ack_after_the_work_survives_every_single_fault(kind):
    assert assert_survives_every_step(scenario(ack_first=False), kinds=[kind]) > 15


def test_random_faults_and_noise_find_it_too_and_the_failure_is_made_small():
    noisy = scenario(ack_first=True, config=SimConfig(), faults=6, horizon_s=3.0)
    failed = next(outcome for seed in range(200) if (outcome := play(noisy, seed)).error and len(outcome.faults) > 3)
    small = minimise(failed)
    assert small.error is not None
    assert len(small.faults) < len(failed.faults)


def test_a_run_that_has_not_failed_is_not_made_small_and_a_seed_that_does_not_reproduce_is_named():
    held = play(scenario(ack_first=False), 3, faults=())
    with pytest.raises(ValueError, match="jobs: seed 3 breaks no promise"):
        minimise(held)
    assert explain(held).startswith("jobs: no promise is broken")
    once = dataclasses.replace(held, error=Violation("not done: {1}"))
    assert explain(once).endswith("(the seed does not reproduce: played again, no promise is broken)")


def test_the_right_order_holds_under_random_faults():
    assert assert_holds(scenario(ack_first=False, config=SimConfig(noise=0.1), faults=8), range(60)) > 1000
