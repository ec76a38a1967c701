"""Batch prompts in pools with prefill workers, in virtual time: interactive prompts do not wait behind them."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from benchmarks.disagg.node import Request
from benchmarks.disagg.world import World
from headrace.broker.blocks import block_chain
from headrace.router.placement.disagg_planner import DisaggPlanner
from headrace.router.placement.settings import AdmissionSettings, SchedulerSettings
from headrace.router.placement.transfer import PrefillView
from headrace.workers.engine import Role
from headrace.workers.sim.settings import SimSettings

BLOCK = 64
ENGINE = SimSettings(
    timing="h100-8b", block_size=BLOCK, blocks=6000, slots=64, step_tokens=2048, disagg="params", fabric="local"
)
NODES = [(Role.PREFILL, ENGINE), (Role.DECODE, ENGINE), (Role.DECODE, ENGINE)]
SETTINGS = SchedulerSettings(prefill="always", limits=AdmissionSettings(window=100_000, class_share={}, hopeless=False))


def request(rng: random.Random, at_s: float, kind: str, length: int) -> Request:
    tokens = rng.choices(range(20_000), k=length)
    return Request(at_s, kind, tokens, block_chain(tokens, BLOCK), 8)


def chats() -> list[Request]:
    rng = random.Random(1)
    return [request(rng, 0.2 + 0.05 * n, "chat", 400) for n in range(80)]


def file() -> list[Request]:
    rng = random.Random(2)
    return [request(rng, 0.0, "batch", 1500) for _ in range(60)]


def first_tokens(requests: Sequence[Request]) -> list[float]:
    """The seconds to the first token of each chat, sorted."""
    world = World(requests, NODES, SETTINGS)
    served = world.run()
    assert not world.shed
    assert all(one.first_s >= 0 for one in served)
    assert not any(one.fell_back for one in served)
    return sorted(one.ttft_s for one in served if one.request.kind == "chat")


def test_a_chat_waits_for_no_more_than_the_batch_prompt_in_the_engine_and_one_that_shares_its_step() -> None:
    without, beside = first_tokens(chats()), first_tokens([*chats(), *file()])
    prompt_s = 1500 / 24_000 + 0.01
    assert beside[-1] < without[-1] + 2 * prompt_s


def test_with_the_room_of_interactive_requests_batch_prompts_would_hold_chats_up(monkeypatch: pytest.MonkeyPatch) -> None:
    ruled = first_tokens([*chats(), *file()])

    def as_others(self: DisaggPlanner, side: PrefillView, *, alone: bool) -> PrefillView:
        return side

    monkeypatch.setattr(DisaggPlanner, "for_batch", as_others)
    without_rule = first_tokens([*chats(), *file()])
    assert without_rule[40] > 1.4 * ruled[40]
    assert without_rule[-1] > 1.4 * ruled[-1]
