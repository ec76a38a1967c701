"""The simulated server does what a real nats-server does."""

import asyncio
import traceback

import pytest

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.provision import ensure_topology
from headrace.jetstream.subjects import Subjects
from tests.simulation.scenarios import SCENARIOS, run, topology
from tests.simulation.virtual.machine import Machine
from tests.simulation.virtual.network import CALM
from tests.simulation.virtual.world import World


@pytest.mark.parametrize("name", SCENARIOS)
def test_simulated_server(name):
    subjects = Subjects("hr")
    finished = []

    async def main(machine: Machine):
        await run(SCENARIOS[name], machine.messaging, machine.connect(), subjects)
        finished.append(name)

    with World(1, CALM) as world:
        world.server.install(topology(subjects))
        world.process("P", main)
        world.run(60.0)
    assert finished == [name]


async def against_real(name, url, prefix, making):
    subjects = Subjects(prefix)
    options = ConnectOptions(servers=(url,))
    async with (
        await Connection.connect(options, subjects=subjects) as a,
        await Connection.connect(options, subjects=subjects) as b,
    ):
        async with making:
            await ensure_topology(a, topology(subjects))
        async with asyncio.timeout(30.0):
            await run(SCENARIOS[name], a, b, subjects)


@pytest.fixture(scope="module")
def real_outcomes(nats_server):
    """All scenarios at the same time, each with a prefix of its own: they mostly wait."""

    making = asyncio.Semaphore(4)  # hundreds of streams made at once take a busy machine too long

    async def guarded(number, name):
        try:
            await against_real(name, nats_server.url, f"sem{number}", making)
        except Exception:
            return traceback.format_exc()
        return ""

    async def every():
        return await asyncio.gather(*(guarded(number, name) for number, name in enumerate(SCENARIOS)))

    return dict(zip(SCENARIOS, asyncio.run(every()), strict=True))


@pytest.mark.parametrize("name", SCENARIOS)
def test_real_server(name, real_outcomes):
    assert real_outcomes[name] == ""
