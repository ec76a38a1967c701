from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headrace.workers.sglang.resumed_penalties import EMITTED, HOOKS, counted, emitted_of


def request(tokens: list[int], emitted: int | None) -> Any:
    custom = None if emitted is None else {EMITTED: emitted}
    return SimpleNamespace(origin_input_ids=tokens, sampling_params=SimpleNamespace(custom_params=custom))


BATCH = [request([7, 8, 9], None), request([7, 3, 3, 5], 3), request([1], 0)]


def test_the_tokens_behind_the_prompt_of_a_resumed_request_are_those_emitted_before() -> None:
    assert list(emitted_of(BATCH)) == [(1, [3, 3, 5])]


@pytest.mark.parametrize(
    ("kind", "start", "expected"),
    [
        ("presence", 0.0, [0, 0, 0, 0.5, 0, 0.5, 0, 0, 0, 0]),
        ("frequency", 0.0, [0, 0, 0, 1.0, 0, 0.5, 0, 0, 0, 0]),
        ("repetition", 1.0, [1, 1, 1, 0.5, 1, 0.5, 1, 1, 1, 1]),
    ],
)
def test_they_count_as_if_this_engine_had_generated_them(kind: str, start: float, expected: list[float]) -> None:
    torch = pytest.importorskip("torch")  # comes with the engines
    cumulated = torch.full((3, 10), start)
    penalties = {f"{kind}_penalties": torch.full((3, 1), 0.5), f"cumulated_{kind}_penalties": cumulated}
    counted(kind)(None, SimpleNamespace(**penalties, orchestrator=SimpleNamespace(reqs=lambda: BATCH)))
    assert cumulated[1].tolist() == expected
    assert cumulated[0].tolist() == cumulated[2].tolist() == [start] * 10


def test_the_hooks_follow_the_making_of_each_penalizer() -> None:
    assert {hook.kind for hook in HOOKS} == {"after"}
    assert [hook.target.rpartition(".penaltylib.")[2] for hook in HOOKS] == [
        "presence_penalty.BatchedPresencePenalizer._prepare",
        "frequency_penalty.BatchedFrequencyPenalizer._prepare",
        "repetition_penalty.BatchedRepetitionPenalizer._prepare",
    ]
