"""The simulator says only what it may: allowed tokens, biases at their ends, bad words."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from headrace.broker.messages.requests import Sampling
from headrace.workers.detokenize import TextPipeline
from headrace.workers.engine import Sequence
from headrace.workers.errors import RequestInvalid
from headrace.workers.sim.answers import answer_to
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.settings import SimSettings
from headrace.workers.sim.tokens import bundled_vocabulary, expected_ids
from tests.support.sim_replay import replay
from tests.support.sim_world import NO_FAULTS, sequence

EOS = 2
PROMPT = [4, 5, 6]
TABLE = bundled_vocabulary().table


def said(*, emitted: list[int] | None = None, mean: float = 0.0, **sampling) -> list[int]:
    asked = Sequence(
        id="a",
        token_ids=PROMPT + (emitted or []),
        prompt_tokens=len(PROMPT),
        sampling=Sampling(**{"max_tokens": 200, **sampling}),
    )
    line = replay([(0.0, asked)], SimSettings(mean_output_tokens=mean)).timelines[0]
    assert line.error is None
    return line.ids


def text(ids: list[int]) -> str:
    return b"".join(TABLE.token_bytes(token) for token in ids).decode(errors="replace")


def test_a_banned_token_is_never_said_and_the_rest_of_the_answer_stays():
    plain = expected_ids(PROMPT, 200)
    banned = plain[10]
    ids = said(logit_bias={banned: -100.0})
    assert banned not in ids
    assert [new for old, new in zip(plain, ids, strict=True) if old != banned and new != old] == []


def test_a_character_of_several_tokens_goes_with_any_of_them():
    plain = text(expected_ids(PROMPT, 2000))
    assert "🙂" in plain
    tokens = {token: -100.0 for token in range(49152) if TABLE.token_bytes(token) == "🙂".encode()[-1:]}
    assert tokens
    assert "🙂" not in text(said(max_tokens=2000, logit_bias=tokens))


def test_smaller_biases_change_nothing():
    assert said(logit_bias=dict.fromkeys(range(100), 99.0) | {28: -99.0}) == expected_ids(PROMPT, 200)


@given(st.lists(st.integers(17, 49151), min_size=1, max_size=30, unique=True))
def test_only_allowed_tokens_are_said_and_all_kinds_of_them(allowed):
    ids = said(allowed_token_ids=allowed)
    assert set(ids) <= set(allowed)
    assert len(set(ids)) > len(allowed) / 2


def test_a_forced_token_is_all_there_is():
    assert set(said(logit_bias={500: 100.0})) == {500}
    assert set(said(logit_bias={500: 100.0, 600: 120.0, 700: 5.0})) == {500, 600}
    assert set(said(logit_bias={500: 100.0, 501: 100.0}, allowed_token_ids=[500, 600])) == {500}
    assert set(said(logit_bias={500: -100.0}, allowed_token_ids=[500, 600])) == {600}


def test_the_end_comes_only_where_it_is_allowed():
    assert said(mean=5.0)[-1] == EOS
    assert EOS not in said(mean=5.0, logit_bias={EOS: -100.0})
    assert EOS not in said(mean=5.0, allowed_token_ids=[500, 600])
    with_end = said(mean=5.0, allowed_token_ids=[500, 600, EOS])
    assert with_end[-1] == EOS
    assert len(with_end) == len(said(mean=5.0))
    assert said(allowed_token_ids=[EOS]) == said(logit_bias={EOS: 100.0}) == [EOS]
    assert said(allowed_token_ids=[EOS], ignore_eos=True, max_tokens=4) == [EOS] * 4


def test_a_bad_word_is_not_said_however_it_would_be_spelled():
    plain = text(expected_ids(PROMPT, 400))
    word = plain.split()[30].strip(",.")
    assert f" {word} " in plain
    ids = said(max_tokens=400, bad_words=[word, "é"])
    assert word.encode() not in [TABLE.token_bytes(token).strip() for token in ids]
    assert "é" in plain
    assert "é" not in text(ids)


def test_of_a_bad_phrase_only_the_last_word_is_kept_back():
    plain = expected_ids(PROMPT, 100)
    first, second = plain[20:22]
    phrase = text([first, second])
    ids = said(max_tokens=100, bad_words=[phrase.strip()])
    assert ids[:21] == plain[:21]
    assert ids[21] != second
    assert phrase not in text(ids)


def test_a_resume_says_the_same():
    options = {"bad_words": ["the", "of"], "logit_bias": {28: -100.0}, "seed": 3}
    whole = said(**options)
    for cut in (1, 31, 32, 33, 100):
        assert said(emitted=whole[:cut], **options | {"max_tokens": 200 - cut}) == whole[cut:]


@pytest.mark.parametrize(
    ("sampling", "param"),
    [
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 49152]}, "allowed_token_ids"),
        ({"logit_bias": {-1: 5.0}}, "logit_bias"),
        ({"bad_words": [" "]}, "bad_words"),
        ({"allowed_token_ids": [500], "logit_bias": {500: -100.0}}, "allowed_token_ids"),
        ({"logit_bias": dict.fromkeys(range(49152), -100.0)}, "logit_bias"),
        ({"allowed_token_ids": [EOS], "min_tokens": 1}, "min_tokens"),
    ],
)
def test_what_leaves_nothing_to_say_is_refused_by_name(sampling, param):
    scheduler = SimScheduler(SimSettings(), bundled_vocabulary())
    with pytest.raises(RequestInvalid) as caught:
        scheduler.submit(sequence_with(sampling), NO_FAULTS)
    assert caught.value.param == param
    assert scheduler.ids == []


def sequence_with(sampling: dict) -> Sequence:
    plain = sequence("a", PROMPT)
    return Sequence(id=plain.id, token_ids=plain.token_ids, prompt_tokens=3, sampling=Sampling(max_tokens=9, **sampling))


def test_where_every_word_is_banned_other_tokens_are_left():
    words = {token: -100.0 for token in bundled_vocabulary().draws if token >= 0}
    ids = answer_to(sequence_with({"logit_bias": words}), bundled_vocabulary())
    ids.grow()
    assert not words.keys() & set(ids.ids)


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
    monkeypatch.setattr("headrace.workers.sim.answers.guided_text", unlucky)
    with pytest.raises(RequestInvalid):
        answer_to(sequence, bundled_vocabulary())
    tainted = answer_to(sequence, bundled_vocabulary(), taint=7)
    tainted.grow()
    assert tainted.ids
