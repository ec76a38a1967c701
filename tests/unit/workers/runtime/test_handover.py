"""What a decode worker makes of the router's decision, and what it decides itself where there is none."""

from __future__ import annotations

import dataclasses
import random
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.broker.messages.requests import Generation, PrefillDecision
from headrace.workers.engine import DisaggStyle, Role
from headrace.workers.runtime.decode_side import HandoverDeps, pick
from headrace.workers.runtime.handover import HandoverCoordinator, Situation, decide
from headrace.workers.runtime.prefill_side import PrefixLender
from headrace.workers.settings import WorkerSettings
from tests.support.runtime_bench import INFO

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


ROUTED = PrefillDecision(remote=True, worker="p", reason="long")
IMAGE = [{"kind": "image", "digest": 1, "start": 0, "length": 1}]


def coordinator_decided(generation: Generation, **info: Any) -> PrefillDecision:
    peers = [SimpleNamespace(worker="p")]
    client = SimpleNamespace(peers=lambda handover, adapter=None: peers)
    deps = HandoverDeps(
        client=client,  # type: ignore[arg-type]
        engines=None,  # type: ignore[arg-type]
        info=dataclasses.replace(INFO, handover="h", **info),
        style=DisaggStyle.PARAMS,
        worker="d",
    )
    lender = PrefixLender(None, INFO)  # type: ignore[arg-type]
    settings = WorkerSettings(model="m", prefill="always")
    coordinator = HandoverCoordinator(deps, settings, role=lambda: "decode", lender=lender)
    return coordinator.decide(SimpleNamespace(prefill=ROUTED), [SimpleNamespace(tokens=999, uncached=999)], generation)  # type: ignore[arg-type, list-item]


def test_prompts_with_media_are_computed_here_unless_the_engine_hands_them_over() -> None:
    text = Generation(token_ids=b"")
    shown = msgspec.structs.replace(text, media=IMAGE)
    assert coordinator_decided(text) == ROUTED
    assert coordinator_decided(shown) == PrefillDecision(reason="media")
    assert coordinator_decided(shown, hands_over_media=True) == ROUTED


def test_structured_output_is_begun_here_if_the_prefill_side_would_sample_its_first_token() -> None:
    forced = Generation(token_ids=b"", guided={"regex": "a"})
    assert coordinator_decided(forced) == ROUTED
    assert coordinator_decided(forced, prefill_samples=True) == PrefillDecision(reason="guided")


@pytest.mark.parametrize(
    ("asked", "reason"), [({"prompt_logprobs": 1}, "prompt_logprobs"), ({"prompt_embeds": b""}, "prompt_embeds")]
)
def test_what_another_worker_cannot_compute_is_named(asked: dict[str, Any], reason: str) -> None:
    assert coordinator_decided(msgspec.structs.replace(Generation(token_ids=b""), **asked)) == PrefillDecision(reason=reason)


def test_of_those_that_have_the_adapter_the_given_source_chooses() -> None:
    able = [SimpleNamespace(worker=name) for name in "abcd"]
    peers = [*able, SimpleNamespace(worker="without")]
    state = random.getstate()
    drawn = [[pick(able, peers, rng) for _ in range(20)] for rng in (random.Random(1), random.Random(1))]  # type: ignore[arg-type]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == set("abcd")
    assert random.getstate() == state, "nobody else's numbers are touched"
    assert pick(able, able, random.Random(1)) == pick([], peers, random.Random(1)) == ""  # type: ignore[arg-type]
