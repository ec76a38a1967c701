"""The command `headrace bench compare`: Headrace and its peers in turns, as ratios of neighbouring turns."""

from __future__ import annotations

import argparse
import os
import platform
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import uvloop

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.base.logs import configure
from headrace.commands.groups import add_group
from headrace.tools.argument_types import count, positive
from headrace.tools.bench.load import Target, bodies, run_closed
from headrace.tools.bench.serve import BUSY_CLIENT, add_serve
from headrace.tools.bench.stand import HEADRACE, MODEL, PEERS, NotInstalled, Server, Stand, rss_mib, tree, used_s
from headrace.tools.replay_bench.command import add_replay

GRACE_S = 120.0  # for answers that are under way when a turn is over
Progress = Callable[[str], None]


class Turn(msgspec.Struct, frozen=True):
    """Figures of one server in one turn. `back_end_us` is what the mock back end used, beside `cpu_us` of the server itself."""

    requests_s: float
    tokens_s: float
    cpu_us: float
    back_end_us: float
    ttft_p50_ms: float
    ttft_p99_ms: float
    answered: int
    failed: int
    tokens_per_answer: float
    client_cores: float
    rss_mib: float
    error: str = ""


class Ratio(msgspec.Struct, frozen=True):
    """Headrace's figure by a peer's, of the turns of one round each: the median, the least and the most."""

    median: float
    least: float
    most: float


class ComparisonReport(msgspec.Struct, frozen=True, kw_only=True):
    """All turns by server, ratios by peer and figure, and the peers that could not be had, with the reason."""

    conditions: dict[str, str | int | float]
    about: dict[str, str]
    turns: dict[str, list[Turn]]
    ratios: dict[str, dict[str, Ratio]]
    missing: dict[str, str]
    loads: list[float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """The requests of a turn, the same for each server: until so many requests or seconds are over."""

    streams: int
    tokens: int
    words: int
    requests: int
    seconds: float


def until(asked: Sequence[bytes], end_s: float) -> Iterator[bytes]:
    for body in asked:
        if time.perf_counter() >= end_s:
            return
        yield body


def take_turn(server: Server, work: Work, seed: int) -> Turn:
    """Ask one server. Raises CommandError when it stops answering."""
    asked = bodies(MODEL, requests=work.requests, words=work.words, tokens=work.tokens, seed=seed)
    mine, back_end, client = tree(server.roots), tree(server.back_end), {os.getpid()}
    before = [used_s(pids) for pids in (mine, back_end, client)]
    limited = until(asked, time.perf_counter() + work.seconds)
    target = Target("127.0.0.1", server.port, MODEL)
    outcome = uvloop.run(run_closed(target, limited, streams=work.streams, timeout_s=work.seconds + GRACE_S))
    own_s, back_end_s, client_s = (used_s(pids) - old for pids, old in zip((mine, back_end, client), before, strict=True))
    answered, seconds = max(1, outcome.ok), max(1e-9, outcome.seconds)
    return Turn(
        requests_s=outcome.ok / seconds,
        tokens_s=outcome.chunks / seconds,
        cpu_us=own_s / answered * 1e6,
        back_end_us=back_end_s / answered * 1e6,
        ttft_p50_ms=outcome.percentile_ms("first_token_s", 0.5),
        ttft_p99_ms=outcome.percentile_ms("first_token_s", 0.99),
        answered=outcome.ok,
        failed=outcome.failed,
        tokens_per_answer=outcome.chunks / answered,
        client_cores=client_s / seconds,
        rss_mib=rss_mib(mine),
        error=next(iter(outcome.errors), "")[:200],
    )


def compare(
    servers: dict[str, Server], work: Work, rounds: int, progress: Progress
) -> tuple[dict[str, list[Turn]], list[float]]:
    """Ask all in turns, each round in another order. Returns the turns of each, and the load of the machine at each round."""
    turns: dict[str, list[Turn]] = {name: [] for name in servers}
    loads = []
    names = list(servers)
    for name, server in servers.items():
        take_turn(server, _warm_up(work), -2 - names.index(name))
    for number in range(rounds):
        loads.append(os.getloadavg()[0])
        for place in range(len(names)):
            name = names[(place + number) % len(names)]
            turns[name].append(take_turn(servers[name], work, number * 100 + names.index(name)))
            one = turns[name][-1]
            progress(f"round {number + 1}: {name}: {one.requests_s:,.0f} requests/s, {one.cpu_us:,.0f} us of CPU per request")
            if one.client_cores > BUSY_CLIENT:
                progress(f"  the client used {one.client_cores:.2f} of its one core: it may be what was measured")
    return turns, loads


def _warm_up(work: Work) -> Work:
    return Work(streams=work.streams, tokens=work.tokens, words=work.words, requests=work.requests, seconds=work.seconds / 3)


FIGURES = ("requests_s", "tokens_s", "cpu_us", "ttft_p50_ms")


def ratios(turns: dict[str, list[Turn]]) -> dict[str, dict[str, Ratio]]:
    """Return Headrace's figures by each peer's, turn by turn. Turns without an answer are left out."""
    found: dict[str, dict[str, Ratio]] = {}
    for name, theirs in turns.items():
        if name == HEADRACE:
            continue
        pairs = [(one, other) for one, other in zip(turns[HEADRACE], theirs, strict=True) if one.answered and other.answered]
        found[name] = {}
        for figure in FIGURES:
            values = [getattr(one, figure) / getattr(other, figure) for one, other in pairs if getattr(other, figure) > 0]
            if values:
                found[name][figure] = Ratio(median(values), min(values), max(values))
    return found


_COLUMNS = (
    ("requests/s", "requests_s", 0),
    ("tokens/s", "tokens_s", 0),
    ("CPU us/req", "cpu_us", 0),
    ("mock us/req", "back_end_us", 0),
    ("TTFT p50 ms", "ttft_p50_ms", 1),
    ("RSS MiB", "rss_mib", 0),
    ("tokens/answer", "tokens_per_answer", 1),
    ("client cores", "client_cores", 2),
)
_RATIOS = (("requests_s", "requests/s"), ("tokens_s", "tokens/s"), ("cpu_us", "CPU per request"), ("ttft_p50_ms", "TTFT p50"))


def _middle(turns: Sequence[Turn], figure: str) -> float:
    return float(median(getattr(turn, figure) for turn in turns))


def render(report: ComparisonReport) -> str:
    """Return the conditions, the medians of each server, and Headrace's ratios to each peer."""
    conditions = ", ".join(f"{name} {value}" for name, value in report.conditions.items())
    loads = ", ".join(f"{load:.1f}" for load in report.loads)
    lines = [f"{conditions}; load of the machine at each round {loads}", ""]
    lines += [f"{name}: {about}" for name, about in report.about.items()]
    lines += ["", f"{'medians':14}" + "".join(f"{head:>14}" for head, _, _ in _COLUMNS)]
    for name, turns in report.turns.items():
        figures = "".join(f"{_middle(turns, figure):>14,.{digits}f}" for _, figure, digits in _COLUMNS)
        lines.append(f"{name:14}{figures}")
        if failed := sum(turn.failed for turn in turns):
            lines.append(f"  {failed} failed: {next(turn.error for turn in turns if turn.error)}")
    if report.ratios:
        lines += ["", f"{HEADRACE} : peer, of the turns of one round each, median (least to most)"]
        lines.append(f"{'':14}" + "".join(f"{name:>26}" for _, name in _RATIOS))
    for name, found in report.ratios.items():
        cells = []
        for figure, _ in _RATIOS:
            one = found.get(figure)
            cells.append("-" if one is None else f"{one.median:.2f} ({one.least:.2f} to {one.most:.2f})")
        lines.append(f"{name:14}" + "".join(f"{cell:>26}" for cell in cells))
    lines += [f"\n{name} is missing: {why}" for name, why in report.missing.items()]
    return "\n".join(lines) + "\n"


# `headrace bench compare`: Headrace beside other servers and gateways on this machine, asked in turns.

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


def add_bench(commands: Any, about: str) -> None:
    actions = add_group(commands, "bench", about=about)
    add_serve(actions)
    add_compare(actions)
    add_replay(actions)
