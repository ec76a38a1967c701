"""What a query in PromQL asks for: metrics, and the labels that it needs of each."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import promql_parser
import yaml

from tests.docs.blocks import ROOT
from tests.docs.metrics_table import everything

FOLDER = ROOT / "deploy" / "prometheus"
OF_TARGETS = {"instance", "job"}  # what Prometheus adds to every series


def rules(file: str) -> list[dict[str, Any]]:
    """The rules of a file, of all its groups."""
    return [rule for group in yaml.safe_load((FOLDER / file).read_text())["groups"] for rule in group["rules"]]


def known() -> dict[str, set[str]]:
    """Every series that a query may name, with its labels."""
    found: dict[str, set[str]] = {"up": set(OF_TARGETS)}
    for metric in everything():
        for series in metric.series:
            found[series] = {*metric.labels, *OF_TARGETS, *({"le"} if series.endswith("_bucket") else ())}
    for rule in rules("recording_rules.yaml"):
        head = rule["record"].partition(":")[0]
        found[rule["record"]] = {head} if head in ("model", "pool") else set()
    return found


def _nodes(node: Any, by: frozenset[str] = frozenset()) -> Iterator[tuple[Any, frozenset[str]]]:
    """Every selector below a node, with the labels that are grouped by around it."""
    if isinstance(node, promql_parser.VectorSelector):
        yield node, by
        return
    if isinstance(node, promql_parser.AggregateExpr) and node.modifier is not None:
        by = by | set(node.modifier.labels)
    for name in ("lhs", "rhs", "expr", "vector_selector", "param"):
        if (child := getattr(node, name, None)) is not None and not isinstance(child, (str, float)):
            yield from _nodes(child, by)
    for child in getattr(node, "args", None) or ():
        yield from _nodes(child, by)


def faults(query: str) -> list[str]:
    """What a query asks for that does not exist. Raises ValueError for one that is no PromQL."""
    filled = re.sub(r"\$__rate_interval", "1m", query)
    series = known()
    found = []
    for selector, by in _nodes(promql_parser.parse(filled)):
        if selector.name not in series:
            found.append(f"no metric {selector.name}")
            continue
        asked = {matcher.name for matcher in selector.matchers.matchers} | by
        found += [f"no label {label} of {selector.name}" for label in sorted(asked - series[selector.name])]
    return found
