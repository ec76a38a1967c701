"""What tests of hand-overs share: a prompt, a pair of engines that pull, and a prompt that is computed."""

from __future__ import annotations

from typing import Any

from tests.support.sim_world import Node, World

PROMPT = list(range(10, 28))  # four whole blocks and a half
RENDEZVOUS = {"disagg": "rendezvous"}


def pulling(world: World, **options: Any) -> tuple[Node, Node]:
    return world.pair(transfer_mode="pull", **options)


def prefilled(world: World, p: Node, prompt: list[int] = PROMPT, name: str = "a") -> Any:
    """Run a prompt through the prefill engine; its parameters. Time does not go on to the end of the lease."""
    p.prefill(name, prompt)
    world.run(0.5)
    return p.params(name)
