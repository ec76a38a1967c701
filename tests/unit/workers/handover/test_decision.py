"""What a decode worker makes of the router's decision, and what it decides itself where there is none."""

from dataclasses import replace

import pytest

from headrace.broker.messages import PrefillDecision
from headrace.workers.engine import Role
from headrace.workers.handover.decision import Situation, decide

HERE = Situation(role=Role.DECODE, hands_over=True, peers=frozenset({"p1"}), tokens=1000, uncached=1000, block_size=32)
REMOTE = PrefillDecision(remote=True, worker="p1", reason="prefix_there", wait_s=3.0)


def decided(routed: PrefillDecision | None = None, *, mode: str = "auto", **changes: object) -> PrefillDecision:
    return decide(routed, replace(HERE, **changes), mode=mode, min_tokens=256)  # type: ignore[arg-type]


def test_the_routers_word_counts() -> None:
    assert decided(REMOTE) == REMOTE
    local = PrefillDecision(remote=False, reason="cheaper")
    assert decided(local, mode="always") == local


def test_without_a_router_long_prompts_are_computed_elsewhere() -> None:
    assert decided() == PrefillDecision(remote=True, reason="pays")
    assert decided(tokens=200, uncached=200) == PrefillDecision(reason="short")
    assert decided(uncached=200) == PrefillDecision(reason="cached")
    assert decided(mode="never") == PrefillDecision(reason="never")
    assert decided(tokens=200, uncached=200, mode="always") == PrefillDecision(remote=True, reason="always")


@pytest.mark.parametrize("routed", [None, REMOTE])
def test_what_is_cached_here_is_not_fetched(routed: PrefillDecision | None) -> None:
    assert decided(routed, uncached=32, mode="always") == PrefillDecision(reason="cached")
    assert decided(routed, tokens=20, uncached=20, mode="always") == PrefillDecision(reason="short")


@pytest.mark.parametrize("routed", [None, REMOTE])
def test_nobody_there_means_here(routed: PrefillDecision | None) -> None:
    assert decided(routed, peers=frozenset(), mode="always").reason == "no_prefill_worker"


def test_a_chosen_prefill_worker_that_is_gone_is_replaced_by_any() -> None:
    decision = decided(REMOTE, peers=frozenset({"p2"}))
    assert (decision.remote, decision.worker) == (True, "")


@pytest.mark.parametrize("role", [Role.AGGREGATED, Role.PREFILL])
def test_only_a_decode_worker_asks_others(role: Role) -> None:
    assert decided(REMOTE, role=role) == PrefillDecision(reason="aggregated")
    assert decided(REMOTE, hands_over=False) == PrefillDecision(reason="aggregated")


def test_what_needs_the_whole_prompt_here_stays_here() -> None:
    assert decided(REMOTE, needs_own_prefill="prompt_logprobs") == PrefillDecision(reason="prompt_logprobs")


def test_a_job_that_not_all_can_do_is_sent_to_one_that_can() -> None:
    anybody = PrefillDecision(remote=True, reason="pays", wait_s=3.0)
    assert decided(anybody, directed="p1") == PrefillDecision(remote=True, reason="pays", wait_s=3.0, worker="p1")
    assert decided(anybody) == anybody
    assert decided(directed="p1") == PrefillDecision(remote=True, reason="pays", worker="p1")
    assert decided(mode="always", directed="p1") == PrefillDecision(remote=True, reason="always", worker="p1")
    assert decided(REMOTE, peers=frozenset({"p2"}), directed="p2").worker == "p2", "the router's choice is gone"
