"""`headrace bench compare`: Headrace beside other servers and gateways on this machine, asked in turns."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.base.logs import configure
from headrace.tools.argument_types import count, positive
from headrace.tools.peer_bench.comparison import ComparisonReport, Work, compare, ratios
from headrace.tools.peer_bench.environment import NotInstalled
from headrace.tools.peer_bench.peers import HEADRACE, PEERS
from headrace.tools.peer_bench.report import render
from headrace.tools.peer_bench.stand import Stand

_ABOUT = (
    "Install peers, each into an environment of its own, start them and Headrace side by side, ask all in turns for streamed "
    "chats, and print the ratios. Gateways stand before a mock back end of their own, whose CPU is said apart; Headrace runs "
    "its simulator. A peer that cannot be had is named."
)
_EXAMPLES = """examples:
  headrace bench compare litellm vllm-router smg
  headrace bench compare dynamo --model ./SmolLM2-135M-Instruct --rounds 5 --json ratios.json
  headrace bench compare --streams 64 --tokens 128 --seconds 5

Peers are downloaded from the package index that pip uses: Dynamo with PyTorch some GB, LiteLLM 300 MB."""


def add_compare(actions: Any) -> None:
    """Add `headrace bench compare` to the command line."""
    parser = actions.add_parser(
        "compare",
        help="measure Headrace beside other servers and gateways, and print the ratios",
        description=_ABOUT,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_compare, prog="headrace bench compare")
    add = parser.add_argument
    add("peers", nargs="*", metavar="PEER", help=f"any of {', '.join(PEERS)} (default: all)")
    add("--rounds", type=count, default=3, metavar="N", help="turns of each server (default: 3)")
    add("--streams", type=count, default=64, metavar="N", help="connections, each with one request at a time (default: 64)")
    add("--tokens", type=count, default=16, metavar="N", help="of each answer (default: 16)")
    add("--words", type=count, default=32, metavar="N", help="of each prompt (default: 32)")
    add("--requests", type=count, default=4000, metavar="N", help="most requests of a turn (default: 4000)")
    add("--seconds", type=positive, default=5.0, metavar="X", help="most seconds in which a turn asks (default: 5)")
    add("--routers", type=int, choices=range(9), default=1, metavar="N", help="of Headrace (default: 1)")
    add("--model", type=Path, metavar="FOLDER", help="tokenizer and chat template for dynamo; Headrace's simulator has its own")
    folder = Path("~/.cache/headrace/peers")
    add("--environments", type=Path, default=folder, metavar="DIR", help=f"where peers are installed (default: {folder})")
    add("--json", type=Path, metavar="FILE", help="write all figures here")


def run_compare(parsed: argparse.Namespace) -> int:
    """Run the command. Returns 1 if a peer is missing or a request failed. Raises CommandError."""
    configure(level="warning")
    names: Sequence[str] = parsed.peers or list(PEERS)
    if unknown := [name for name in names if name not in PEERS]:
        raise CommandError(f"no such peer: {', '.join(unknown)}; there are {', '.join(PEERS)}")
    work = Work(
        streams=parsed.streams, tokens=parsed.tokens, words=parsed.words, requests=parsed.requests, seconds=parsed.seconds
    )
    report = _compared(parsed, names, work)
    sys.stdout.write(render(report))
    if parsed.json is not None:
        try:
            parsed.json.write_bytes(msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n")
        except OSError as error:
            raise CommandError(f"cannot write {parsed.json}: {error.strerror}") from None
    failed = any(turn.failed for turns in report.turns.values() for turn in turns)
    return EXIT_FAILURE if report.missing or failed else EXIT_OK


def _compared(parsed: argparse.Namespace, names: Sequence[str], work: Work) -> ComparisonReport:
    missing: dict[str, str] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-compare-") as scratch, ExitStack() as stack:
        model = parsed.model.absolute() if parsed.model is not None else None
        stand = Stand(stack, Path(scratch), parsed.environments.expanduser(), model)
        try:
            stand.start_headrace(parsed.routers)
        except NotInstalled as error:
            raise CommandError(f"headrace {error}") from error
        for name in names:
            _say(f"{name}: installing if need be, starting")
            try:
                stand.start(PEERS[name])
            except NotInstalled as error:
                missing[name] = str(error)
                _say(f"{name}: left out: {error}")
        turns, loads = compare(stand.servers, work, parsed.rounds, _say)
    about = {HEADRACE: f"one frontend, {parsed.routers} router(s), one worker with the simulator, durable queue, nats-server"}
    return ComparisonReport(
        conditions={
            "streams": work.streams,
            "tokens": work.tokens,
            "words": work.words,
            "requests": work.requests,
            "seconds": work.seconds,
            "rounds": parsed.rounds,
            "cores": os.cpu_count() or 0,
            "python": platform.python_version(),
        },
        about=about | {name: f"{PEERS[name].about}; {PEERS[name].version}" for name in names if name not in missing},
        turns=turns,
        ratios=ratios(turns),
        missing=missing,
        loads=loads,
    )


def _say(line: str) -> None:
    sys.stderr.write(line + "\n")
    sys.stderr.flush()
