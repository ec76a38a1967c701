"""Structured answers as the simulated engine says them: whole, ended, and the same after a resume."""

from __future__ import annotations

import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from headrace.broker.messages import Sampling
from headrace.workers.engine import Sequence
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.answers.answers import answer_to
from headrace.workers.sim.answers.tokens import bundled_vocabulary
from headrace.workers.sim.settings import SimSettings
from headrace.workers.text.pipeline import TextPipeline
from tests.support.sim_replay import replay

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}, "b": {"type": "array", "items": {"type": "number"}}}}


def run(prompt: list[int], *, emitted: list[int] | None = None, **sampling: Any) -> tuple[list[int], str | None]:
    sequence = Sequence(
        id="a",
        token_ids=prompt + (emitted or []),
        prompt_tokens=len(prompt),
        sampling=Sampling(**{"max_tokens": 2000, **sampling}),
        guided={"json": {**SCHEMA, "required": ["a", "b"]}},
    )
    line = replay([(0.0, sequence)], SimSettings()).timelines[0]
    assert line.error is None
    return line.ids, line.finish


def test_an_answer_is_its_json_and_then_the_end_whatever_else_is_asked():
    for options in ({}, {"ignore_eos": True}, {"min_tokens": 1999}, {"temperature": 0.0}):
        ids, finish = run([1, 2, 3], **options)
        assert (ids[-1], finish) == (2, "stop")
        pipeline = TextPipeline(bundled_vocabulary().table, prompt_ids=[1, 2, 3])
        Draft202012Validator(SCHEMA).validate(json.loads("".join(map(pipeline.push, ids[:-1])) + pipeline.finish()))


def test_prompt_and_seed_change_it_and_a_resume_does_not():
    whole, _ = run([1, 2, 3])
    for cut in range(len(whole)):
        assert run([1, 2, 3], emitted=whole[:cut]) == (whole[cut:], "stop")
    assert len({tuple(run([1, 2, 3], seed=seed)[0]) for seed in range(5)}) == 5
    assert run([1, 2, 3], temperature=0.0, seed=1) == run([1, 2, 3], temperature=0.0, seed=2)
    assert run([1, 2, 4])[0] != whole
    assert run([1, 2, 3], max_tokens=3) == (whole[:3], "length")


def test_an_engine_that_finds_wrong_blocks_does_not_fall_over_a_request_it_cannot_satisfy_now(monkeypatch):
    def unlucky(guided: object, draws: object) -> str:
        raise RequestInvalid("json: no luck", param="json")

    sequence = Sequence(
        id="a", token_ids=[1], prompt_tokens=1, sampling=Sampling(max_tokens=5), guided={"json": {"type": "integer"}}
    )
    monkeypatch.setattr("headrace.workers.sim.answers.answers.guided_text", unlucky)
    with pytest.raises(RequestInvalid):
        answer_to(sequence, bundled_vocabulary())
    tainted = answer_to(sequence, bundled_vocabulary(), taint=7)
    tainted.grow()
    assert tainted.ids
