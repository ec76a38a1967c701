"""Runs `headrace chaos`: a deployment of its own on this machine, faults drawn from a seed, mixed load, and the report."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path

import structlog

from headrace.base import logs
from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError, StartFailed
from headrace.commands.dlq import letters
from headrace.commands.waiting import told_while
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.client import LedgerClient
from headrace.tools.chaos.deployment import MODEL, ChaosDeployment, DeploymentShape
from headrace.tools.chaos.fault_injector import FaultInjector
from headrace.tools.chaos.host_stalls import HostStalls
from headrace.tools.chaos.ledger import Ledger
from headrace.tools.chaos.questions import DEADLINE_S, draw_questions
from headrace.tools.chaos.quiescence import until_at_rest, until_well
from headrace.tools.chaos.report import ChaosReport, render
from headrace.tools.chaos.schedule import draw_faults, kinds_of

_log = structlog.get_logger()

_START_TIMEOUT_S = 120.0
_REST_TIMEOUT_S = 45.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosOptions:
    """Options of a chaos run. `kinds` None: all of the mode. `folder` None: a folder that is removed if all promises held."""

    minutes: float = 3.0
    seed: int = 0
    clients: int = 8
    shape: DeploymentShape = field(default_factory=DeploymentShape)
    kinds: tuple[str, ...] | None = None
    folder: Path | None = None

    def chosen(self) -> list[str]:
        """Return the kinds of faults to inject. Raises CommandError if a kind is unknown in this mode."""
        possible = kinds_of(self.shape.mode)
        for kind in self.kinds or ():
            if kind not in possible:
                raise CommandError(f"{kind!r} is no fault in the mode {self.shape.mode}; there are: {', '.join(possible)}")
        return list(self.kinds or possible)


def run_chaos(options: ChaosOptions, *, as_json: bool, log_level: str = "warning") -> int:
    """Run the command and return its exit code. Raises CommandError if the run cannot start."""
    logs.configure(level=log_level, fields={"component": "chaos"})
    _check(options)
    folder = options.folder or Path(tempfile.mkdtemp(prefix="headrace-chaos-"))
    if options.folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise CommandError(f"{folder} is not empty")
    try:
        report = asyncio.run(told_while(chaos(options, folder), f"faults for {options.minutes:g} minutes"))
    except KeyboardInterrupt:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    sys.stdout.write(json.dumps(report.as_data(), indent=1) + "\n" if as_json else render(report))
    if report.broken:
        sys.stderr.write(f"the logs of all processes are in {folder}\n")
        return EXIT_FAILURE
    if options.folder is None:
        shutil.rmtree(folder, ignore_errors=True)
    return EXIT_OK


async def chaos(options: ChaosOptions, folder: Path) -> ChaosReport:
    """Run the deployment under load and faults. Raises CommandError if the deployment does not start."""
    names = Subjects()
    ledger = Ledger()
    async with ChaosDeployment(folder, options.shape) as deployment:
        connect = ConnectOptions(servers=(deployment.server.url,), name="headrace chaos")
        async with await _connected(connect, names) as connection:
            if not await until_well(deployment, connection, names, timeout_s=_START_TIMEOUT_S):
                raise StartFailed(f"the deployment was not ready within {_START_TIMEOUT_S:g} s; its logs are in {folder}")
            _log.info("chaos.began", seed=options.seed, pid=os.getpid())
            questions = draw_questions(options.seed)
            client = LedgerClient(ledger, questions, deployment.frontends, model=MODEL, clock=time.monotonic)
            injector = FaultInjector(deployment, ledger, connection, names, clock=time.monotonic)
            load = asyncio.create_task(client.run(options.clients), name="load")
            stalls = HostStalls(connection, names, ledger, clock=time.monotonic)
            stall_task = asyncio.create_task(stalls.run(), name="stalls")
            try:
                until_s = time.monotonic() + 60.0 * options.minutes
                await injector.run(draw_faults(options.seed, options.chosen()), until_s=until_s)
                client.stop()
                async with asyncio.timeout(2 * DEADLINE_S):
                    await load
            except TimeoutError:
                injector.troubles.append("requests are still open long after their deadline")
            finally:
                load.cancel()
                stall_task.cancel()
                await asyncio.gather(load, stall_task, return_exceptions=True)
            residue = await until_at_rest(connection, names, deployment.frontends, timeout_s=_REST_TIMEOUT_S)
            dead = await letters(connection, names)
    return ChaosReport(
        seed=options.seed,
        mode=options.shape.mode,
        minutes=options.minutes,
        ledger=ledger,
        residue=residue,
        dead_letters=len(dead),
        troubles=injector.troubles,
        longest_stall_s=stalls.own_s,
        server_stall_s=stalls.server_s,
        epoch_s=time.time() - time.monotonic(),
    )


async def _connected(options: ConnectOptions, names: Subjects) -> Connection:
    try:
        return await Connection.connect(options, subjects=names)
    except JetStreamError as error:
        raise StartFailed(str(error)) from error


def _check(options: ChaosOptions) -> None:
    options.chosen()
    shape = options.shape
    if not 0 < options.minutes < float("inf"):
        raise CommandError(f"--minutes must be above 0, got {options.minutes:g}")
    for name, count, least in (
        ("--workers", shape.workers, 2),
        ("--prefill-workers", shape.prefill_workers, 1),
        ("--routers", shape.routers, 0),
        ("--frontends", shape.frontends, 1),
        ("--clients", options.clients, 1),
    ):
        if count < least:
            raise CommandError(f"{name} must be {least} or more, got {count}")
    if shape.mode == "disagg" and find_spec("nixl") is None:
        raise CommandError("--mode disagg moves KV blocks over NIXL, and the package nixl is not installed")
