"""`headrace bench replay`: traces through the router over simulated workers, with neither a GPU nor a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any, TypeVar

from headrace.base.errors import EXIT_OK, CommandError
from headrace.base.logs import configure
from headrace.router.errors import RouterError
from headrace.tools.argument_types import count, positive
from headrace.tools.replay_bench.classic import SWEEP, WIDE_SWEEP
from headrace.tools.replay_bench.engine import EngineModel
from headrace.tools.replay_bench.measure import as_builtins
from headrace.tools.replay_bench.policies import ALL, DYNAMO, EARLY, DynamoCore, Policy
from headrace.tools.replay_bench.replay import KNEE_PRECISION, ReplayPool
from headrace.tools.replay_bench.report import Comparison, ReplayReport, Scenario, facts, render
from headrace.tools.replay_bench.trace import GENERATORS, SAMPLE, Trace, assign, generate, read_trace

T = TypeVar("T")

PEERS_FOLDER = Path("~/.cache/headrace/peers")  # where `headrace bench compare` installs

_EXAMPLES = """examples:
  headrace bench replay                                     the shipped slice of a trace, all policies
  headrace bench replay trace.jsonl --blocks 2000,4000 --rate 3,5
  headrace bench replay trace.jsonl --sequential --routers 1,2,4
  headrace bench replay trace.jsonl --find-knee --policy kv,classic,round-robin
  headrace bench replay --generate conversations --requests 4000 --classes hi:0.2,std:0.8 --tenants 10 --rate 6

Times are virtual: a replay takes seconds. The engines are modelled, the router is the real one. docs/performance.md says
what is modelled and what the columns mean."""


def add_replay(actions: Any) -> None:
    parser = actions.add_parser(
        "replay",
        help="replay a trace through the router over simulated workers, in virtual time",
        description="Replay a Mooncake-format trace through the router over simulated workers, in virtual time.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_replay, prog="headrace bench replay")
    add = parser.add_argument
    add(
        "trace",
        nargs="?",
        type=Path,
        help="JSON lines with timestamp, input_length, output_length, hash_ids (default: a slice)",
    )
    add("--generate", choices=tuple(GENERATORS), help="instead of a file, a trace made up with --seed")
    add("--requests", type=count, metavar="N", help="only the first N requests; with --generate how many (default: 4000)")
    add("--workers", type=count, default=8, metavar="N", help="default: 8")
    add(
        "--blocks",
        type=_list(count),
        default=[2000],
        metavar="N,…",
        help="cache of one worker, in 512-token blocks (default: 2000)",
    )
    add("--routers", type=_list(count), default=[1], metavar="N,…", help="routers that share the work (default: 1)")
    add(
        "--policy",
        type=_list(str),
        default=list(ALL),
        metavar="NAME,…",
        help=f"default: {','.join(ALL)}; NAME{EARLY} binds at once; {DYNAMO} is Dynamo's own selection core",
    )
    add("--environments", type=Path, default=PEERS_FOLDER, metavar="DIR", help=f"has Dynamo in it (default: {PEERS_FOLDER})")
    add("--rate", type=_list(positive), default=[1.0], metavar="X,…", help="factors on the trace's own speed (default: 1)")
    add("--sequential", action="store_true", help="one request after the other, without timing: hit rate and balance")
    add("--find-knee", action="store_true", help="the highest rate with TTFT p90 ≤ 3 s of each policy, and all around it")
    add("--precision", type=positive, default=KNEE_PRECISION, metavar="X", help="of knees, relative (default: 0.01)")
    add("--classes", type=_shares, default={}, metavar="NAME:SHARE,…", help="draw request classes")
    add("--tenants", type=count, default=0, metavar="N", help="draw tenants t0, t1, … of skewed load")
    add("--skew", type=positive, default=1.0, metavar="X", help="load of the n-th tenant goes as 1/n^X (default: 1)")
    add(
        "--tenant-weights",
        type=_shares,
        default={},
        metavar="NAME:WEIGHT,…",
        help="what a tenant is entitled to (default: 1 each)",
    )
    add("--deadline", type=positive, default=float("inf"), metavar="SECONDS", help="of every request (default: none)")
    add("--wide-sweep", action="store_true", help="try weights of `classic` beyond their documented range, too")
    add(
        "--set",
        type=_setting,
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of the scheduler, as in fairness.slack_tokens=0",
    )
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    add("--json", action="store_true", help="as JSON")
    add("--quiet", action="store_true", help="no lines about progress")


def run_replay(parsed: argparse.Namespace) -> int:
    """Run the replay command. Raises CommandError for a trace or an option that cannot be used."""
    configure(level="warning")
    try:
        with ExitStack() as stack:
            report = _measure(parsed, _core(parsed, stack))
    except RouterError as error:
        raise CommandError(str(error)) from error
    sys.stdout.write(json.dumps(as_builtins(report), indent=1) + "\n" if parsed.json else render(report))
    return EXIT_OK


def _core(parsed: argparse.Namespace, stack: ExitStack) -> DynamoCore | None:
    if DYNAMO not in parsed.policy:
        return None
    return stack.enter_context(DynamoCore(parsed.environments.expanduser() / DYNAMO / "bin" / "python"))


def _measure(parsed: argparse.Namespace, core: DynamoCore | None) -> ReplayReport:
    trace = _trace(parsed)
    policies = [_policy(name, parsed, core) for name in parsed.policy]
    scenarios: list[Scenario] = []
    for blocks in parsed.blocks:
        for routers in parsed.routers:
            comparison = Comparison(
                pool=ReplayPool(
                    trace=trace,
                    workers=parsed.workers,
                    model=EngineModel(blocks=blocks),
                    routers=routers,
                    seed=parsed.seed,
                    deadline_s=parsed.deadline,
                ),
                policies=policies,
                sweep=WIDE_SWEEP if parsed.wide_sweep else SWEEP,
                tenant_weights=parsed.tenant_weights,
                precision=parsed.precision,
                progress=_progress(parsed),
            )
            if parsed.sequential:
                scenarios.append(comparison.sequential())
            elif parsed.find_knee:
                scenarios.append(comparison.knees())
            else:
                scenarios.append(comparison.in_time(parsed.rate))
    dynamo = None if core is None else core.facts()
    return ReplayReport(trace=facts(trace), seed=parsed.seed, scenarios=scenarios, dynamo=dynamo)


def _trace(parsed: argparse.Namespace) -> Trace:
    if parsed.generate is not None:
        if parsed.trace is not None:
            raise CommandError(f"{parsed.trace}: a trace or --generate, not both")
        trace = generate(parsed.generate, requests=parsed.requests or 4000, seed=parsed.seed)
    else:
        trace = read_trace(parsed.trace or SAMPLE, limit=parsed.requests)
    if parsed.classes or parsed.tenants:
        trace = assign(trace, classes=parsed.classes, tenants=parsed.tenants, skew=parsed.skew, seed=parsed.seed)
    return trace


def _policy(name: str, parsed: argparse.Namespace, core: DynamoCore | None) -> Policy:
    if name == DYNAMO:
        return Policy(name=name, core=core)
    settings = dict(parsed.set)
    if parsed.tenant_weights:
        settings = {"fairness.weights": parsed.tenant_weights, **settings}
    return Policy(name=name, settings=settings)


def _progress(parsed: argparse.Namespace) -> Callable[[str], None]:
    def show(text: str) -> None:
        if not parsed.quiet:
            sys.stderr.write(f"{text}\n")
            sys.stderr.flush()

    return show


def _list(item: Callable[[str], T]) -> Callable[[str], list[T]]:
    def parse(text: str) -> list[T]:
        return [item(part.strip()) for part in text.split(",")]

    return parse


def _shares(text: str) -> dict[str, float]:
    """Parse `a:0.2,b:0.8`. A name without a share has 1."""
    shares: dict[str, float] = {}
    for part in text.split(","):
        name, colon, share = part.strip().partition(":")
        if not name or name in shares:
            raise argparse.ArgumentTypeError(f"{text!r}: a name is missing or there twice")
        shares[name] = positive(share) if colon else 1.0
    return shares


def _setting(text: str) -> tuple[str, Any]:
    """Parse `name=value`; the value is JSON if it can be."""
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value
