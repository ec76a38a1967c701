"""docs/metrics.md has every metric, and every metric keeps the rules that are written there."""

from __future__ import annotations

import ast
import re

import pytest

from tests.docs.blocks import ROOT
from tests.docs.metrics_table import ENGINES, FILE, MODULES, Declared, everything, imported_as, with_lists

PACKAGES = (
    "jetstream",
    "broker",
    "router",
    "workers",
    "frontend",
    "headrace/up",
    "headrace/commands",
    "headrace/planner",
    "tools",
)
UNITS = ("_seconds", "_bytes", "_tokens", "_descriptors")  # of histograms: base units, or things that are counted
OTHER_UNITS = re.compile(r"_(ms|msec|milliseconds|us|micros|minutes|hours|days|kb|mb|gb|kib|mib|gib|percent|pct)(_|$)")
LABEL_ROW = re.compile(r"^\| ((?:`\w+`(?:, )?)+) \| [^|]+ \|$", re.MULTILINE)
MOST_BUCKETS = 20


def bounded_labels() -> set[str]:
    """The labels that the page bounds."""
    section = FILE.read_text().partition("### Labels")[2].partition("\n### ")[0]
    return {label for row in LABEL_ROW.findall(section) for label in re.findall(r"`(\w+)`", row)}


def faults(one: Declared) -> list[str]:
    """What is wrong with a metric by the rules of the page."""
    found = []
    if not re.fullmatch(r"(headrace|gen_ai)_[a-z][a-z0-9]*(_[a-z0-9]+)+", one.name):
        found.append("the name")
    if OTHER_UNITS.search(one.name):
        found.append("a unit that is no base unit")
    if one.kind == "histogram" and not one.name.endswith(UNITS):
        found.append("a histogram without a unit")
    if one.kind != "counter" and one.name.endswith("_total"):
        found.append("_total on what is no counter")
    if unbounded := set(one.labels) - bounded_labels():
        found.append(f"labels that the page does not bound: {sorted(unbounded)}")
    if list(one.buckets) != sorted(set(one.buckets)) or len(one.buckets) > MOST_BUCKETS:
        found.append("the buckets")
    if one.kind == "histogram" and not one.buckets:
        found.append("buckets that nobody chose")
    if not one.help or (not one.help[0].isupper() and not one.help[0].isdigit()) or one.help.endswith("."):
        found.append("the help")
    return found


def test_the_lists_of_metrics_are_up_to_date() -> None:
    text = FILE.read_text()
    assert text == with_lists(text), "run: python -m tests.docs.metrics_table"


def test_every_metric_keeps_the_rules() -> None:
    metrics = everything()
    assert len(metrics) > 150
    assert {one.name: faults(one) for one in metrics if faults(one)} == {}


def test_no_two_metrics_have_one_name() -> None:
    names = [one.name for one in everything()]
    assert sorted(names) == sorted(set(names))


@pytest.mark.parametrize(
    ("bad", "fault"),
    [
        (Declared("worker_runs", "gauge", (), (), "Runs"), "the name"),
        (Declared("headrace_worker_wait_ms", "gauge", (), (), "Wait"), "a unit that is no base unit"),
        (Declared("headrace_worker_wait", "histogram", (), (1.0, 2.0), "Wait"), "a histogram without a unit"),
        (Declared("headrace_worker_wait_seconds", "histogram", (), (2.0, 1.0), "Wait"), "the buckets"),
        (Declared("headrace_worker_wait_seconds", "histogram", (), (), "Wait"), "buckets that nobody chose"),
        (Declared("headrace_worker_runs_total", "gauge", (), (), "Runs"), "_total on what is no counter"),
        (Declared("headrace_worker_runs", "gauge", ("id",), (), "Runs"), "labels that the page does not bound: ['id']"),
        (Declared("headrace_worker_runs", "gauge", (), (), "runs."), "the help"),
    ],
)
def test_a_metric_that_breaks_a_rule_is_found(bad: Declared, fault: str) -> None:
    assert faults(bad) == [fault]


def imports_a_metric(source: str) -> bool:
    return any(
        isinstance(node, ast.ImportFrom)
        and node.module in ("prometheus_client", "headrace.base.metrics", "headrace.frontend.metrics")
        and {"Counter", "FastHistogram", "Gauge", "Histogram", "Summary", "Info"} & {name.name for name in node.names}
        for node in ast.walk(ast.parse(source))
    )


def test_metrics_are_declared_in_the_modules_of_the_page_only() -> None:
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py") if not file.is_symlink()]
    found = {
        str(file.relative_to(ROOT).with_suffix("")).replace("/", ".") for file in files if imports_a_metric(file.read_text())
    }
    assert found - ENGINES == set(MODULES)


def users(module: str, sources: dict[str, str]) -> dict[str, str]:
    """By file, the name under which it has a module of metrics."""
    parent, _, name = imported_as(module).rpartition(".")
    pattern = re.compile(rf"^\s*from {re.escape(parent)} import [^\n]*\b{name}\b(?: as (\w+))?", re.MULTILINE)
    return {file: match[1] or name for file, text in sources.items() if (match := pattern.search(text))}


def test_every_metric_is_counted_somewhere() -> None:
    """One that is declared and never set shows 0 for ever, which looks like good news."""
    files = [file for package in PACKAGES for file in (ROOT / package).rglob("*.py")]
    sources = {str(file.relative_to(ROOT)): file.read_text() for file in files}
    unused = []
    for module in set(MODULES) - {"frontend.metrics"}:
        own = sources[f"{module.replace('.', '/')}.py"]
        has = users(module, sources)
        for name in re.findall(r"^([A-Z_]+) = (?:Counter|Gauge|Histogram)\(", own, re.MULTILINE):
            elsewhere = any(re.search(rf"\b{alias}\.{name}\b", sources[file]) for file, alias in has.items())
            imported = any(
                re.search(rf"\b{name}\b", text) for text in sources.values() if f"{imported_as(module)} import" in text
            )
            if not (elsewhere or imported or len(re.findall(rf"\b{name}\b", own)) > 1):
                unused.append(f"{module}.{name}")
    assert unused == []


def test_every_metric_of_the_frontend_is_counted_somewhere() -> None:
    text = "".join(file.read_text() for file in (ROOT / "frontend").rglob("*.py"))
    names = re.findall(r"self\.(\w+) = (?:Counter|Gauge|FastHistogram)\(", (ROOT / "frontend" / "metrics.py").read_text())
    assert len(names) > 20
    assert [name for name in names if len(re.findall(rf"\.{name}\b", text)) < 2] == []


def test_every_label_of_the_page_is_used() -> None:
    assert bounded_labels() == {label for one in everything() for label in one.labels}
