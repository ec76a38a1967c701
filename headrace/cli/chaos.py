"""Adds `headrace chaos` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

EXAMPLES = """examples:
  headrace chaos --minutes 3 --seed 7
  headrace chaos --mode disagg --fault 'prefill kill' --fault 'nats restart'

Brings up a deployment of its own on this machine and takes it down again; it touches no other one. The same seed gives the same
faults and requests; what they meet differs from run to run. Every answer is compared with what the simulator must say.

exit codes: 0 every promise was kept, 1 one was broken (the report names it, and where the logs are)"""


def add_chaos(commands: Any, about: str) -> None:
    """Add `headrace chaos`."""
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
    from headrace.tools.chaos.run import ChaosOptions, run_chaos

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
