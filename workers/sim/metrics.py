"""Prometheus metrics of hand-overs between simulated engines."""

from __future__ import annotations

from headrace.base.metrics import Counter

BROKEN = Counter("headrace_sim_broken_blocks_total", "Blocks of another engine that arrived with a wrong checksum")
STRANGE = Counter("headrace_sim_strange_messages_total", "Notices and cards of other engines that could not be used", ["what"])
