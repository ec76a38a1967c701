"""Renders a comparison as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median

from headrace.tools.peer_bench.comparison import ComparisonReport, Turn
from headrace.tools.peer_bench.peers import HEADRACE

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
