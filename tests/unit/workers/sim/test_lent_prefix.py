"""A prefill side that reads the prefix which the decode side has in its cache, simulated."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.workers.engine import Handover, Output
from headrace.workers.errors import RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.tokens import expected_ids
from tests.support.sim_world import SIZE, Node, World
from tests.unit.workers.sim.handover_bench import PROMPT, pulling

LENT = 4 * SIZE  # whole blocks of the prompt that the decode side has


def lent(world: World, d: Node, prompt: list[int] = PROMPT, name: str = "l") -> Any:
    """What a decode side offers of a prefix that it has computed before."""
    d.submit(name, prompt[: LENT + 1], handover=Handover(kind="lend"))
    world.run(0.5)
    return d.params(name)


def reading(p: Node, params: Any, prompt: list[int] = PROMPT, name: str = "a") -> None:
    p.submit(name, prompt, handover=Handover(kind="prefill", params=params))


def first(node: Node, name: str) -> Output:
    output: Output = node.outputs[name][0][1]
    return output


def test_the_prefill_side_reads_the_prefix_and_hands_the_prompt_over_as_if_it_had_computed_it() -> None:
    world = World()
    p, d = pulling(world)
    params = lent(world, d)
    reading(p, params)
    world.run(0.5)
    assert first(p, "a").cached_tokens == 0
    assert (first(p, "a").extra or {})["remote_tokens"] == LENT + 1
    assert p.scheduler.stats()["fetched_blocks"] == 5
    assert d.used == 0, "what was lent is given back when it has been read"
    d.decode("b", PROMPT, p.params("a"))
    world.run()
    assert d.ids("b") == expected_ids(PROMPT, 10)
    assert first(d, "b").cached_tokens == LENT
    assert (p.used, d.used) == (0, 0)


def test_what_the_prefill_side_has_itself_is_not_read() -> None:
    world = World()
    p, d = pulling(world)
    reading(p, None, name="before")
    world.run(0.5)
    reading(p, lent(world, d))
    world.run(0.5)
    assert first(p, "a").cached_tokens == LENT
    assert (first(p, "a").extra or {}).get("remote_tokens", 0) <= 1
    assert d.used == 0


def test_a_lender_that_has_died_is_a_failed_transfer() -> None:
    world = World()
    p, d = pulling(world)
    params = lent(world, d)
    d.kill()
    reading(p, params)
    world.run(30.0)
    fault = p.fault("a")
    assert fault is not None
    assert (fault.code, fault.retriable) == ("transfer_failed", True)
    assert p.used == 0


def test_an_aborted_reader_tells_the_lender() -> None:
    world = World()
    p, d = pulling(world, timing_overrides={"kv_bytes_per_token": 1e9, "transfer_bytes_per_s": 1e9})
    reading(p, lent(world, d))
    world.run(1.0)
    p.scheduler.abort(["a"])
    world.run(29.0)
    assert (p.used, d.used) == (0, 0)


def test_what_belongs_to_another_prompt_is_refused() -> None:
    world = World()
    p, d = pulling(world)
    with pytest.raises(RequestInvalid, match="another prompt"):
        reading(p, lent(world, d), [7, *PROMPT[1:]])


def test_an_engine_that_pushes_lends_nothing() -> None:
    world = World()
    _, d = world.pair(transfer_mode="push")
    with pytest.raises(UnsupportedByEngine, match="pull"):
        lent(world, d)
