"""The simulator's answers: pure, readable, with the ends that were asked for."""

from __future__ import annotations

import math
from pathlib import Path
from statistics import mean

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models

from headrace.broker.messages import Sampling
from headrace.workers.errors import EngineStartFailed
from headrace.workers.sim.answers.tokens import SimAnswer, Vocabulary, bundled_vocabulary, expected_ids, expected_text

EOS = 2
prompts = st.lists(st.integers(0, 49151), max_size=20)


@given(prompts, st.integers(0, 300), st.integers(0, 300))
def test_a_longer_answer_begins_with_the_shorter_one(prompt, one, other):
    short, long = sorted((one, other))
    assert expected_ids(prompt, long)[:short] == expected_ids(prompt, short)


def test_the_answer_to_a_prompt_never_changes():
    """Written down: other tests, and other machines, rely on the same answer."""
    assert expected_ids([1, 2, 3], 6) == [28, 5454, 2073, 28, 7167, 28]


def test_prompt_adapter_and_seed_each_change_the_answer():
    answers = [
        expected_ids([1, 2, 3], 20),
        expected_ids([1, 2, 4], 20),
        expected_ids([1, 2, 3], 20, adapter="a"),
        expected_ids([1, 2, 3], 20, sampling=Sampling(seed=1)),
        expected_ids([1, 2, 3], 20, sampling=Sampling(seed=2)),
    ]
    assert len({tuple(answer) for answer in answers}) == 5


def test_a_seed_means_nothing_at_temperature_zero():
    greedy = [expected_ids([5], 20, sampling=Sampling(temperature=0.0, seed=seed)) for seed in (None, 1, 2)]
    assert greedy[0] == greedy[1] == greedy[2]


def test_answers_look_like_text_with_some_characters_of_several_tokens():
    text = expected_text([7, 7], 2000)
    words = text.split()
    assert len(words) > 1000
    assert mean(len(word) for word in words) > 3
    assert any(ord(char) > 0xFFFF for char in text)
    assert "\ufffd" not in text[:-1]


@given(prompts, st.integers(0, 40))
def test_min_tokens_holds_off_the_end(prompt, least):
    ids = expected_ids(prompt, 400, sampling=Sampling(min_tokens=least), mean_tokens=5.0)
    assert len(ids) > least
    assert ids[-1] == EOS
    assert EOS not in ids[:-1]


def test_ignore_eos_runs_to_the_limit():
    assert len(expected_ids([1], 500, sampling=Sampling(ignore_eos=True), mean_tokens=2.0)) == 500


def test_lengths_have_the_mean_that_was_asked_for():
    lengths = [len(expected_ids([n], 2000, mean_tokens=50.0)) for n in range(600)]
    assert mean(lengths) == pytest.approx(50, rel=0.15)
    assert len(set(lengths)) > 50


def test_few_answers_are_much_shorter_or_longer_than_the_mean():
    lengths = sorted(len(expected_ids([n], 2000, mean_tokens=192.0)) for n in range(400))
    assert lengths[0] > 20
    assert 50 < lengths[20] < 100  # one in twenty is shorter
    assert 330 < lengths[-20] < 500  # one in twenty is longer


def test_a_stop_token_ends_the_answer_and_is_its_last():
    plain = expected_ids([9], 50)
    stop = plain[20]
    ids = expected_ids([9], 50, sampling=Sampling(stop_token_ids=[stop]))
    assert ids == plain[: plain.index(stop) + 1]


@given(prompts, st.integers(0, 200), st.integers(0, 20))
def test_logprobs_are_a_distribution_with_the_token_on_top(prompt, index, top):
    answer = SimAnswer(bundled_vocabulary(), prompt, sampling=Sampling())
    row = answer.logprob(index, 100, top)
    assert row == answer.logprob(index, 100, top)
    assert len(row.top) == top
    values = [logprob for _, _, logprob in row.top]
    assert values == sorted(values, reverse=True)
    assert sum(math.exp(value) for value in values) <= 1.0
    assert len({token for token, _, _ in row.top}) == top
    if top:
        assert row.top[0] == (100, row.token, row.logprob)


def save(tokenizer: Tokenizer, folder: Path) -> Path:
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_any_tokenizer_with_words_will_do(tmp_path):
    words = ["[UNK]", "[SEP]", "cat", "dog", "##s", "the", "."]
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[SEP]")])
    (tmp_path / "tokenizer_config.json").write_text('{"eos_token": {"content": "[SEP]"}}')
    vocabulary = Vocabulary.load(save(tokenizer, tmp_path))
    assert vocabulary.eos == 1
    assert vocabulary.size == 7
    text = expected_text([2], 30, vocabulary=vocabulary)
    assert set(text.replace(".", "").split()) <= {"cat", "dog", "the", "##s", "s"}


def test_a_tokenizer_without_words_or_files_is_refused(tmp_path):
    with pytest.raises(EngineStartFailed, match="tokenizer_dir"):
        Vocabulary.load(tmp_path)
    with pytest.raises(EngineStartFailed, match="no tokens that are words"):
        Vocabulary.load(save(Tokenizer(models.WordLevel(vocab={"1": 0}, unk_token="1")), tmp_path))
