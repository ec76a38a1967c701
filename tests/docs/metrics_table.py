"""The lists of metrics in docs/metrics.md, made from the metrics themselves.

`python -m tests.docs.metrics_table` writes them anew; a test compares.
"""

from __future__ import annotations

import importlib
import textwrap
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
    "jetstream.health": "the console",
    "broker.metrics": "`ingress`, `models`: frontends; `worker`: workers; `broker`: every process",
    "broker.durable.metrics": "frontends",
    "broker.batches.record": "frontends",
    "broker.files.store": "frontends",
    "frontend.metrics": "frontends; `gen_ai` are OpenTelemetry's names, `tenant` only where keys are in force",
    "frontend.prompts.media": "frontends",
    "headrace.planner.actuators": "the planner",
    "router.session.metrics": "routers",
    "router.index.inventory": "routers",
    "workers.metrics": "workers",
    "workers.sim.nixl_fabric": "workers with the simulator",
    "workers.nixl.mover": "workers with NIXL: the simulator, and embeddings of media",
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


def declared(module: str) -> list[Declared]:
    """Return the metrics of a module, sorted by name."""
    if module == "frontend.metrics":
        registry: Any = Metrics().registry
        found = [one for one in registry._collector_to_names if isinstance(one, (Counter, Gauge, Histogram, FastHistogram))]
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


def lists() -> str:
    parts = []
    for module, where in MODULES.items():
        parts += [
            f"`{module.replace('.', '/')}.py` ({where}):",
            "",
        ]
        parts += [_item(one) for one in declared(module)] + [""]
    return "\n".join(parts).rstrip()


def _item(one: Declared) -> str:
    name = one.name + (f"{{{','.join(one.labels)}}}" if one.labels else "")
    buckets = f" ({_number(one.buckets[0])} to {_number(one.buckets[-1])})" if one.buckets else ""
    item = f"* `{name}`{buckets}: {one.help}"
    return textwrap.fill(item, 128, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _number(bound: float) -> str:
    return f"{bound:.6f}".rstrip("0").rstrip(".") if bound < 1 else f"{bound:.0f}"


def with_lists(text: str) -> str:
    """The document with the lists as they should be."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{lists()}\n{END}{after}"


if __name__ == "__main__":
    FILE.write_text(with_lists(FILE.read_text()))
