"""The tables of metrics in docs/metrics.md, made from the metrics themselves.

`python -m tests.docs.metrics_table` writes them anew; a test compares.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from typing import Any

from prometheus_client import REGISTRY, Counter, Gauge, Histogram

from headrace.frontend.metrics import FastHistogram, Metrics
from tests.docs.blocks import ROOT

FILE = ROOT / "docs" / "metrics.md"
BEGIN = "<!-- metrics: made by tests/docs/metrics_table.py -->"
END = "<!-- end of metrics -->"

MODULES = {  # module → the processes that count in it
    "jetstream.metrics": "every process",
    "jetstream.stream_metrics": "the console",
    "broker.metrics": "`ingress`, `models`: frontends; `worker`: workers; `broker`: every process",
    "broker.durable.metrics": "frontends",
    "broker.batches.metrics": "frontends",
    "broker.files.metrics": "frontends",
    "frontend.metrics": "frontends",
    "frontend.gen_ai_metrics": "frontends; OpenTelemetry's names",
    "frontend.tenant_metrics": "frontends, where keys are in force",
    "frontend.media.metrics": "frontends",
    "headrace.planner.metrics": "the planner",
    "router.session.metrics": "routers",
    "router.session.fleet_metrics": "routers",
    "router.kv_events.metrics": "routers",
    "workers.metrics": "workers",
    "workers.sim.metrics": "workers with the simulator",
    "workers.nixl.metrics": "workers with NIXL: the simulator, and embeddings of media",
}
ENGINES = {"workers.sglang.metrics"}  # they show the engine's own series and have none themselves


def imported_as(module: str) -> str:
    """Return the name by which a module of the list is imported."""
    return module if module.startswith("headrace.") else f"headrace.{module}"


@dataclass(frozen=True, slots=True)
class Declared:
    """A metric as it is declared. `name` is that of its family in queries, with `_total` for a counter."""

    name: str
    kind: str
    labels: tuple[str, ...]
    buckets: tuple[float, ...]
    help: str

    @property
    def series(self) -> tuple[str, ...]:
        """The names that queries may use."""
        return tuple(f"{self.name}{end}" for end in ("_bucket", "_count", "_sum")) if self.kind == "histogram" else (self.name,)


_OF_APPLICATION = {
    "frontend.metrics": "",
    "frontend.gen_ai_metrics": "gen_ai_",
    "frontend.tenant_metrics": "headrace_frontend_tenant_",
}


def _module_of(name: str) -> str:
    """Return the module that declares a metric of the application."""
    fitting = [module for module, begin in _OF_APPLICATION.items() if name.startswith(begin)]
    return max(fitting, key=lambda module: len(_OF_APPLICATION[module]))


def declared(module: str) -> list[Declared]:
    """Return the metrics of a module, sorted by name."""
    if module in _OF_APPLICATION:
        registry: Any = Metrics().registry
        shown = [one for one in registry._collector_to_names if isinstance(one, (Counter, Gauge, Histogram, FastHistogram))]
        found = [one for one in shown if _module_of(one._name) == module]
    else:
        found = [
            one
            for one in vars(importlib.import_module(imported_as(module))).values()
            if isinstance(one, (Counter, Gauge, Histogram)) and one in REGISTRY._collector_to_names
        ]
    return sorted(map(_read, found), key=lambda one: one.name)


def everything() -> list[Declared]:
    return [one for module in MODULES for one in declared(module)]


def _read(metric: Any) -> Declared:
    if isinstance(metric, FastHistogram):
        return Declared(metric._name, "histogram", metric._labels, metric._bounds, metric._help)
    kind = metric._type
    buckets = tuple(metric._kwargs.get("buckets", ())) if kind == "histogram" else ()
    name = metric._name + ("_total" if kind == "counter" else "")
    return Declared(name, kind, tuple(metric._labelnames), buckets, metric._documentation)


def tables() -> str:
    parts = []
    for module, where in MODULES.items():
        parts += [
            f"`{module.replace('.', '/')}.py` ({where}):",
            "",
            "| metric | type | meaning |",
            "|---|---|---|",
        ]
        parts += [_row(one) for one in declared(module)] + [""]
    return "\n".join(parts).rstrip()


def _row(one: Declared) -> str:
    name = one.name + (f"{{{','.join(one.labels)}}}" if one.labels else "")
    kind = one.kind + (f", {_number(one.buckets[0])} to {_number(one.buckets[-1])}" if one.buckets else "")
    return f"| `{name}` | {kind} | {one.help} |"


def _number(bound: float) -> str:
    return f"{bound:.6f}".rstrip("0").rstrip(".") if bound < 1 else f"{bound:.0f}"


def with_tables(text: str) -> str:
    """The document with the tables as they should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(with_tables(FILE.read_text()))
