"""The command `headrace chaos`: a deployment of its own, faults drawn from a seed, mixed load, and the report."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import structlog

from headrace.base import logs
from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError, StartFailed
from headrace.commands.control import columns
from headrace.commands.dlq import letters
from headrace.commands.progress import told_while
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.subjects import Subjects
from headrace.tools.chaos.client import LedgerClient
from headrace.tools.chaos.deployment import MODEL, ChaosDeployment, DeploymentShape, Residue, until_at_rest, until_well
from headrace.tools.chaos.faults import FaultInjector, HostStalls, draw_faults, kinds_of
from headrace.tools.chaos.ledger import Ledger, Outcome, percentile
from headrace.tools.chaos.questions import DEADLINE_S, draw_questions

_MOST_SHOWN = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class ChaosReport:
    """The result of a chaos run. `dead_letters`: the number of messages in the dead-letter stream at the end.

    Stalls of the host bound the accuracy of the pauses: `longest_stall_s` is the longest of the clients' own process,
    `server_stall_s` the longest time that the NATS server took to store a small message while no fault was made to it.
    """

    seed: int
    mode: str
    minutes: float
    ledger: Ledger
    residue: Residue
    dead_letters: int
    troubles: list[str]
    longest_stall_s: float
    server_stall_s: float = 0.0
    epoch_s: float = 0.0  # Unix time of the ledger's zero

    @property
    def broken(self) -> list[str]:
        """Describe every promise that was not kept. Empty if all were kept."""
        found = [
            f"request {entry.number} ({entry.id or 'no id'}, {entry.frontend}) {entry.outcome.value}: {entry.detail}"
            for entry in self.ledger.broken()
        ]
        found += [f"{count} {name} left at the end" for name, count in self.residue.counts.items() if count]
        found += [f"{name} is the consumer of a worker that is gone" for name in self.residue.orphans]
        poisoned = self.ledger.counts()[Outcome.POISONED]
        if self.dead_letters > poisoned:
            found.append(f"{self.dead_letters} dead letters, but {poisoned} clients were told of poison")
        return found + self.troubles

    def as_data(self) -> dict[str, Any]:
        counts = self.ledger.counts()
        lasted: dict[str, list[float]] = {}
        for injury in self.ledger.injuries:
            lasted.setdefault(injury.kind, []).append(injury.over_s - injury.at_s)
        return {
            "seed": self.seed,
            "mode": self.mode,
            "minutes": self.minutes,
            "faults": dict(sorted(Counter(injury.kind for injury in self.ledger.injuries).items())),
            "sent": len(self.ledger.entries),
            "outcomes": {outcome.value: counts[outcome] for outcome in Outcome if outcome is not Outcome.OPEN},
            "pauses": {
                kind: {
                    "fault_s": round(percentile(lasted[kind.removesuffix(" again")], 0.5), 3),
                    "streams": len(pauses),
                    "p50_s": round(percentile(pauses, 0.5), 3),
                    "p99_s": round(percentile(pauses, 0.99), 3),
                    "max_s": round(max(pauses), 3),
                }
                for kind, pauses in sorted(self.ledger.pauses().items())
            },
            "longest_pauses": self._longest_pauses(),
            "longest_stall_s": round(self.longest_stall_s, 3),
            "server_stall_s": round(self.server_stall_s, 3),
            "residue": self.residue.counts,
            "dead_letters": self.dead_letters,
            "broken": self.broken,
        }

    def _longest_pauses(self) -> list[dict[str, Any]]:
        """Return the longest pauses with victim, request and Unix time of their begin, by which the logs can be searched."""
        longest = sorted(self.ledger.each_pause(), key=lambda pause: -pause.length_s)[:_MOST_SHOWN]
        return [
            {
                "pause_s": round(pause.length_s, 3),
                "kind": pause.kind,
                "victim": pause.victim,
                "request": pause.request,
                "at": round(pause.from_s + self.epoch_s, 3),
                "fault_at": round(pause.fault_s + self.epoch_s, 3),
            }
            for pause in longest
        ]


def render(report: ChaosReport) -> str:
    data = report.as_data()
    counts = data["outcomes"]
    rows = [["faults", ""]] + [[f"  {kind}", str(count)] for kind, count in data["faults"].items()]
    rows += [["", ""], ["requests sent", str(data["sent"])]]
    rows += [
        [f"  {name}", str(counts[outcome.value])]
        for outcome, name in (
            (Outcome.ANSWERED, "answered once and right"),
            (Outcome.CANCELLED, "cancelled by the client"),
            (Outcome.REFUSED, "refused, to be tried again"),
            (Outcome.UNREACHED, "frontend was down"),
            (Outcome.CUT, "cut by their frontend's end"),
            (Outcome.POISONED, "crashed their workers"),
            (Outcome.FAILED, "failed"),
            (Outcome.LOST, "lost"),
            (Outcome.MISSING, "with missing tokens"),
            (Outcome.DUPLICATED, "with duplicated tokens"),
            (Outcome.WRONG, "wrong"),
        )
    ]
    rows += [["", ""], ["left at the end", ""], *([f"  {name}", str(count)] for name, count in report.residue.counts.items())]
    pauses = [["longest pause of a stream, s", "streams", "p50", "p99", "max", "mended after"]]
    numbers = ("p50_s", "p99_s", "max_s", "fault_s")
    pauses += [[f"  {kind}", str(p["streams"]), *(f"{p[n]:.2f}" for n in numbers)] for kind, p in data["pauses"].items()]
    pauses.append(["  (the clients themselves)", "", "", "", f"{report.longest_stall_s:.2f}", ""])
    pauses.append(["  (the NATS server, unhurt)", "", "", "", f"{report.server_stall_s:.2f}", ""])
    head = f"chaos: seed {report.seed}, mode {report.mode}, {report.minutes:g} minutes\n\n"
    text = head + columns(rows) + "\n" + columns(pauses)
    if not (broken := report.broken):
        return text + "\nevery promise was kept\n"
    more = [f"  … and {len(broken) - _MOST_SHOWN} more"] if len(broken) > _MOST_SHOWN else []
    return text + "\n".join(["", f"{len(broken)} promises broken:", *(f"  {b}" for b in broken[:_MOST_SHOWN]), *more]) + "\n"


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


EXAMPLES = """examples:
  headrace chaos --minutes 3 --seed 7
  headrace chaos --mode disagg --fault 'prefill kill' --fault 'nats restart'

Brings up a deployment of its own on this machine and takes it down again; it touches no other one. The same seed gives the same
faults and requests; what they meet differs from run to run. Every answer is compared with what the simulator must say.

exit codes: 0 every promise was kept, 1 one was broken (the report names it, and where the logs are)"""


def add_chaos(commands: Any, about: str) -> None:
    chaos = commands.add_parser(
        "chaos",
        help=about,
        description=about[0].upper() + about[1:] + ".",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = chaos.add_argument
    add("--minutes", type=float, default=3.0, metavar="N", help="how long faults are made (default: 3)")
    add("--seed", type=int, default=0, metavar="S", help="of the faults and the requests (default: 0)")
    add("--engine", choices=("sim",), default="sim", help="the simulator, whose answers are known beforehand")
    add("--mode", choices=("aggregated", "disagg"), default="aggregated", help="disagg: prefill and decode workers apart")
    add("--workers", type=int, default=3, metavar="N", help="workers that answer requests (default: 3)")
    add("--prefill-workers", type=int, default=2, metavar="N", help="with --mode disagg (default: 2)")
    add("--routers", type=int, default=2, metavar="N", help="default: 2")
    add("--frontends", type=int, default=2, metavar="N", help="default: 2")
    add("--clients", type=int, default=8, metavar="N", help="requests that are open at once (default: 8)")
    add(
        "--fault",
        action="append",
        metavar="KIND",
        dest="kinds",
        help="only this kind, as in 'worker kill'; may be given again (default: all)",
    )
    add("--folder", metavar="DIR", help="for data and logs (default: a temporary one, kept if a promise was broken)")
    add("--log-level", choices=("info", "warning"), default="warning", help="info: say what is done to whom (default: warning)")
    add("--json", action="store_true", help="as JSON")
    chaos.set_defaults(run=_run, prog="headrace chaos")


def _run(parsed: argparse.Namespace) -> int:
    from pathlib import Path

    from headrace.tools.chaos.deployment import DeploymentShape

    shape = DeploymentShape(
        mode=parsed.mode,
        workers=parsed.workers,
        prefill_workers=parsed.prefill_workers,
        routers=parsed.routers,
        frontends=parsed.frontends,
    )
    options = ChaosOptions(
        minutes=parsed.minutes,
        seed=parsed.seed,
        clients=parsed.clients,
        shape=shape,
        kinds=tuple(parsed.kinds) if parsed.kinds else None,
        folder=Path(parsed.folder) if parsed.folder else None,
    )
    return run_chaos(options, as_json=parsed.json, log_level=parsed.log_level)
