"""Processes of an earlier version beside those of this one, as in the middle of an upgrade: requests pass between all."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from headrace.jetstream.client import Connection, ConnectOptions
from headrace.tools.chaos.deployment import DeploymentShape, Process
from tests.faults.support.scene import NAMES, Hurt, Scene

pytestmark = [pytest.mark.fault, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
EARLIER = "07611477f7ed"  # 25 November 2026
OLD = ("frontend-1", "aggregated-1", "router-1")
SHAPE = DeploymentShape(
    workers=2,
    routers=2,
    frontends=2,
    engine_arguments=('timing_overrides={"decode_base_s": 0.04, "prefill_tokens_per_s": 20000}', "slots=24"),
)


@pytest.fixture
def earlier(tmp_path: Path) -> Path:
    """The sources of the earlier version, from the history of this checkout."""
    archive = subprocess.run(["git", "archive", EARLIER], cwd=ROOT, capture_output=True, check=False)
    if archive.returncode:
        pytest.skip(f"the history of this checkout does not go back to {EARLIER}")
    folder = tmp_path / "earlier"
    with tarfile.open(fileobj=io.BytesIO(archive.stdout)) as tar:
        tar.extractall(folder, filter="data")
    return folder


class Mixed(Hurt):
    """Some of its processes run the earlier version."""

    def __init__(self, folder: Path, earlier: Path) -> None:
        super().__init__(folder, SHAPE, {}, None, {})
        self.earlier = earlier

    def _process(self, name: str, kind: str, argv: tuple[str, ...]) -> Process:
        process = super()._process(name, kind, argv)
        if name in OLD:
            process.env = {**process.env, "PYTHONPATH": str(self.earlier)}
        return process


async def test_requests_and_their_resumption_pass_between_processes_of_two_versions(tmp_path: Path, earlier: Path) -> None:
    async with Mixed(tmp_path, earlier) as deployment:
        options = ConnectOptions(servers=(deployment.server.url,))
        async with await Connection.connect(options, subjects=NAMES) as connection:
            scene = Scene(deployment, connection, options)
            await scene.well()
            assert {p.name: _runs_from(p, earlier) for p in deployment.processes} == {
                p.name: p.name in OLD for p in deployment.processes
            }
            for router in ("router-1", "router-2"):  # each version places alone for a while
                other = scene.process(router)
                deployment.freeze(other)
                for n in range(8):
                    await scene.serves(frontend=n % 2)
                deployment.thaw(other)
            await scene.well()
            for worker in ("aggregated-1", "aggregated-2"):  # its runs go on at a worker of the other version
                streams = [scene.begin(scene.question(150), frontend=n % 2) for n in range(6)]
                for asked in streams:
                    await asked.began.wait()
                assert set((await scene.inspections()).keys()) == {"aggregated-1", "aggregated-2"}
                deployment.kill(scene.process(worker))
                await scene.answered(*streams)
                await scene.well()
            await scene.at_rest()


def _runs_from(process: Process, folder: Path) -> bool:
    """Whether the process was started with the sources of that folder."""
    variables = Path(f"/proc/{process.pid}/environ").read_bytes().split(b"\0")
    return f"PYTHONPATH={folder}".encode() in variables
