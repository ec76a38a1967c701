"""Adds `headrace bench` and its actions to the command line."""

from __future__ import annotations

from typing import Any

from headrace.commands.groups import add_group
from headrace.tools.peer_bench.command import add_compare
from headrace.tools.replay_bench.command import add_replay
from headrace.tools.serve_bench.command import add_serve


def add_bench(commands: Any, about: str) -> None:
    """Add `headrace bench` and its actions."""
    actions = add_group(commands, "bench", about=about)
    add_serve(actions)
    add_compare(actions)
    add_replay(actions)
