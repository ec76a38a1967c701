"""Shows SGLang's Prometheus metrics on the worker's `/metrics`. Its processes write them into a folder that it is told."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from prometheus_client import REGISTRY, CollectorRegistry, Metric
from prometheus_client.multiprocess import MultiProcessCollector

FOLDER = "PROMETHEUS_MULTIPROC_DIR"


class EngineMetrics:
    """The metrics of one SGLang. Implements the `Collector` of prometheus_client."""

    def __init__(self, folder: Path, registry: CollectorRegistry = REGISTRY) -> None:
        """`folder` must exist; SGLang makes one of its own in it."""
        self._registry = registry
        self._folder = folder
        self._registered = False

    def environment(self) -> dict[str, str]:
        """Return the variable by which SGLang is told the folder."""
        return {FOLDER: str(self._folder)}

    def register(self) -> None:
        self._registry.register(self)
        self._registered = True

    def unregister(self) -> None:
        if self._registered:
            self._registered = False
            self._registry.unregister(self)

    def describe(self) -> Iterable[Metric]:
        """Tell nothing ahead of time: which metrics there are depends on what SGLang does."""
        return ()

    def collect(self) -> Iterable[Metric]:
        for place in (self._folder, *(path for path in self._folder.iterdir() if path.is_dir())):
            files: Any = MultiProcessCollector  # untyped
            yield from files(CollectorRegistry(), path=str(place)).collect()
