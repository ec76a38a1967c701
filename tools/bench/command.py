"""Adds `headrace bench` and its actions to the command line."""

from __future__ import annotations

from typing import Any

from headrace.commands.groups import add_group
from headrace.tools.bench.compare import add_compare
from headrace.tools.bench.serve import add_serve
from headrace.tools.replay_bench.command import add_replay


def add_bench(commands: Any, about: str) -> None:
    """Add `headrace bench` and its actions."""
    actions = add_group(commands, "bench", about=about)
    add_serve(actions)
    add_compare(actions)
    add_replay(actions)
