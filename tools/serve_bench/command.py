"""`headrace bench serve`: asks a running server in a closed or an open loop, and reports latencies, CPU and memory."""

from __future__ import annotations

import argparse
import os
import platform
import sys
from pathlib import Path
from typing import Any

import msgspec
import uvloop

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.base.logs import configure
from headrace.chat.streamed_answer import NoAnswer, served_models
from headrace.commands.progress import Progress
from headrace.router.errors import RouterError
from headrace.tools.argument_types import count, positive
from headrace.tools.replay_bench.trace import Trace, read_trace
from headrace.tools.serve_bench.connection import Outcome
from headrace.tools.serve_bench.load import (
    Target,
    bodies,
    poisson,
    run_at,
    run_closed,
    steady,
    target,
    trace_body,
    trace_times,
)
from headrace.tools.serve_bench.plot import draw
from headrace.tools.serve_bench.processes import Usage, processes_of, usage
from headrace.tools.serve_bench.report import CLIENT, ServeReport, make_report, render
from headrace.up.runfile import read_run_file

URL = "http://127.0.0.1:8000"

_EXAMPLES = """examples:
  headrace bench serve                                      64 streams of 16 tokens, each asks again when it was answered
  headrace bench serve http://10.0.0.7:8000 --streams 8 --tokens 128 --requests 500
  headrace bench serve --rate 200 --poisson --json run.json --plot run.svg
  headrace bench serve --trace trace.jsonl --speed 2

Any server with OpenAI's streamed chats can be asked. CPU and memory are those of the `headrace up` on this machine."""


def add_serve(actions: Any) -> None:
    """Add `headrace bench serve` to the command line."""
    parser = actions.add_parser(
        "serve",
        help="ask a running server, and report latencies, CPU and memory",
        description="Ask a running server for streamed chats, and report latencies, CPU and memory.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run_serve, prog="headrace bench serve")
    add = parser.add_argument
    add("url", nargs="?", default=URL, help=f"of the server (default: {URL})")
    add("--model", help="default: the first that is served")
    add("--requests", type=count, default=2000, metavar="N", help="default: 2000; of a trace, its first N")
    add("--tokens", type=count, default=16, metavar="N", help="of each answer (default: 16)")
    add("--words", type=count, default=32, metavar="N", help="of each prompt (default: 32)")
    add("--streams", type=count, default=64, metavar="N", help="connections, each with one request at a time (default: 64)")
    add("--rate", type=positive, metavar="X", help="ask X requests a second instead, however many are under way")
    add("--poisson", action="store_true", help="with --rate: at random times, as independent clients do")
    add("--trace", type=Path, metavar="FILE", help="ask the requests of a Mooncake-format trace at their times instead")
    add("--speed", type=positive, default=1.0, metavar="X", help="with --trace: X times as fast (default: 1)")
    add("--warm-up", type=int, default=200, metavar="N", help="requests before, which do not count (default: 200)")
    add("--timeout", type=positive, default=600.0, metavar="SECONDS", help="for all requests (default: 600)")
    add("--seed", type=int, default=0, metavar="N", help="of prompts and random times (default: 0)")
    add("--api-key", default=os.environ.get("OPENAI_API_KEY", ""), metavar="KEY", help="default: the variable OPENAI_API_KEY")
    add("--data-dir", type=Path, default=Path(".headrace"), help="of the `headrace up` whose processes are measured")
    add("--json", type=Path, metavar="FILE", help="write all figures here")
    add("--plot", type=Path, metavar="FILE", help="draw the latencies here, as SVG")


def run_serve(parsed: argparse.Namespace) -> int:
    """Run the command. Returns 1 if a request failed. Raises CommandError."""
    configure(level="warning")
    if parsed.trace is not None and parsed.rate is not None:
        raise CommandError("--rate and --trace: one of them says when to ask")
    if parsed.poisson and parsed.rate is None:
        raise CommandError("--poisson needs --rate")
    model = parsed.model or _first_model(parsed.url, parsed.api_key)
    server = target(parsed.url, model, parsed.api_key)
    try:
        trace = read_trace(parsed.trace, limit=parsed.requests) if parsed.trace is not None else None
    except RouterError as error:
        raise CommandError(str(error)) from error
    outcome, report = uvloop.run(_measure(parsed, server, trace))
    if parsed.json is not None:
        _write(parsed.json, msgspec.json.format(msgspec.json.encode(report), indent=1).decode() + "\n")
    if parsed.plot is not None:
        _write(parsed.plot, draw(_curves(outcome)))
    sys.stdout.write(render(report))
    return EXIT_FAILURE if report.failed else EXIT_OK


async def _measure(parsed: argparse.Namespace, server: Target, trace: Trace | None) -> tuple[Outcome, ServeReport]:
    timeout_s = parsed.timeout
    if trace is None:
        asked = bodies(server.model, requests=parsed.requests, words=parsed.words, tokens=parsed.tokens, seed=parsed.seed)
    else:
        asked = [trace_body(server.model, request) for request in trace.requests]
    if parsed.warm_up > 0:
        first = bodies(server.model, requests=parsed.warm_up, words=parsed.words, tokens=parsed.tokens, seed=parsed.seed - 1)
        await run_closed(server, first, streams=min(parsed.streams, parsed.warm_up), timeout_s=timeout_s)
    pids = _processes(parsed.data_dir)
    before = _used(pids)
    with Progress(len(asked), "requests") as bar:
        if trace is not None:
            at_s = trace_times(trace, parsed.speed)
            outcome = await run_at(server, asked, at_s, timeout_s=timeout_s, on_end=bar.update)
        elif parsed.rate is not None:
            at_s = poisson(parsed.rate, len(asked), parsed.seed) if parsed.poisson else steady(parsed.rate, len(asked))
            outcome = await run_at(server, asked, at_s, timeout_s=timeout_s, on_end=bar.update)
        else:
            outcome = await run_closed(server, asked, streams=parsed.streams, timeout_s=timeout_s, on_end=bar.update)
    return outcome, make_report(outcome, before, _used(pids), _conditions(parsed, server))


def _conditions(parsed: argparse.Namespace, server: Target) -> dict[str, str | int | float]:
    found: dict[str, str | int | float] = {"server": parsed.url, "model": server.model}
    if parsed.trace is not None:
        found |= {"trace": str(parsed.trace), "speed": parsed.speed}
    else:
        found |= {"tokens": parsed.tokens, "words": parsed.words}
        loop = f"open, {'Poisson' if parsed.poisson else 'steady'}"
        found |= {"loop": "closed", "streams": parsed.streams} if parsed.rate is None else {"loop": loop, "rate": parsed.rate}
    return found | {"seed": parsed.seed, "cores": os.cpu_count() or 0, "python": platform.python_version()}


def _curves(outcome: Outcome) -> dict[str, list[float]]:
    return {
        "first token": [value * 1e3 for value in outcome.first_token_s],
        "between tokens": [value * 1e3 for value, _ in outcome.gaps_s],
        "whole answer": [value * 1e3 for value in outcome.total_s],
    }


def _first_model(url: str, key: str) -> str:
    try:
        models = served_models(url, api_key=key)
    except NoAnswer as error:
        raise CommandError(str(error)) from error
    if not models:
        raise CommandError(f"{url}: no model is served")
    return models[0]


def _processes(data_dir: Path) -> dict[str, int]:
    """Return the processes of the `headrace up` of this data folder, if one runs here, by name."""
    running = read_run_file(data_dir.resolve())
    return processes_of(data_dir, running.pid) if running is not None and running.alive else {}


def _used(pids: dict[str, int]) -> dict[str, Usage]:
    found = {CLIENT: usage(os.getpid())}
    for name, pid in sorted(pids.items()):
        try:
            found[name] = usage(pid)
        except FileNotFoundError:  # it has ended: nothing is said of it
            continue
    return found


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise CommandError(f"cannot write {path}: {error.strerror}") from None
