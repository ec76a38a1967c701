"""What a decode worker has computed elsewhere, by what is asked for."""

from __future__ import annotations

import dataclasses
import random
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.broker.messages import Generation, PrefillDecision
from headrace.workers.engine import DisaggStyle
from headrace.workers.handover.coordinator import HandoverCoordinator
from headrace.workers.handover.decode_side import HandoverDeps, pick
from headrace.workers.handover.prefix_lending import PrefixLender
from headrace.workers.settings import WorkerSettings
from tests.support.runtime_bench import INFO

ROUTED = PrefillDecision(remote=True, worker="p", reason="long")
IMAGE = [{"kind": "image", "digest": 1, "start": 0, "length": 1}]


def decided(generation: Generation, **info: Any) -> PrefillDecision:
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
    assert decided(text) == ROUTED
    assert decided(shown) == PrefillDecision(reason="media")
    assert decided(shown, hands_over_media=True) == ROUTED


def test_structured_output_is_begun_here_if_the_prefill_side_would_sample_its_first_token() -> None:
    forced = Generation(token_ids=b"", guided={"regex": "a"})
    assert decided(forced) == ROUTED
    assert decided(forced, prefill_samples=True) == PrefillDecision(reason="guided")


@pytest.mark.parametrize(
    ("asked", "reason"), [({"prompt_logprobs": 1}, "prompt_logprobs"), ({"prompt_embeds": b""}, "prompt_embeds")]
)
def test_what_another_worker_cannot_compute_is_named(asked: dict[str, Any], reason: str) -> None:
    assert decided(msgspec.structs.replace(Generation(token_ids=b""), **asked)) == PrefillDecision(reason=reason)


def test_of_those_that_have_the_adapter_the_given_source_chooses() -> None:
    able = [SimpleNamespace(worker=name) for name in "abcd"]
    peers = [*able, SimpleNamespace(worker="without")]
    state = random.getstate()
    drawn = [[pick(able, peers, rng) for _ in range(20)] for rng in (random.Random(1), random.Random(1))]  # type: ignore[arg-type]
    assert drawn[0] == drawn[1]
    assert set(drawn[0]) == set("abcd")
    assert random.getstate() == state, "nobody else's numbers are touched"
    assert pick(able, able, random.Random(1)) == pick([], peers, random.Random(1)) == ""  # type: ignore[arg-type]
