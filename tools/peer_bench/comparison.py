"""Asks Headrace and its peers in turns, and puts their figures side by side as ratios of neighbouring turns."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from statistics import median

import msgspec
import uvloop

from headrace.tools.peer_bench.mock_back_end import MODEL
from headrace.tools.peer_bench.peers import HEADRACE
from headrace.tools.peer_bench.process_tree import rss_mib, tree, used_s
from headrace.tools.peer_bench.stand import Server
from headrace.tools.serve_bench.load import Target, bodies, run_closed
from headrace.tools.serve_bench.report import BUSY_CLIENT

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
    """Yield bodies until the time is over."""
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
