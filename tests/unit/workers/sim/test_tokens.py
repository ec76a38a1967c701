"""Answers that a request prescribes word by word (`sim_answer`), and scripts that do so for requests."""

from __future__ import annotations

import asyncio
import json
import math
import threading
from collections.abc import Sequence as Seq
from pathlib import Path
from statistics import mean

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.broker.messages.requests import Sampling
from headrace.workers.detokenize import TextPipeline
from headrace.workers.engine import EngineConfig, Output, Sequence
from headrace.workers.errors import EngineStartFailed, RequestInvalid, UnsupportedByEngine
from headrace.workers.sim.answers import answer_to
from headrace.workers.sim.engine import SimEngine
from headrace.workers.sim.scheduler import SimScheduler
from headrace.workers.sim.settings import SimSettings
from headrace.workers.sim.tokens import (
    BUNDLED_TOKENIZER,
    SimAnswer,
    Speller,
    Vocabulary,
    bundled_vocabulary,
    expected_ids,
    expected_text,
    read_script,
    scripted,
)
from tests.support.sim_replay import replay
from tests.support.sim_world import NO_FAULTS

EOS = 2
PROMPT = [7, 8, 9]


MISSING = frozenset(range(256)) - {piece[0] for piece in bundled_vocabulary().table.pieces if len(piece) == 1}


def spellable(text: str) -> bool:
    """SmolLM2 has no tokens for some control characters, and for bytes that no text has."""
    return MISSING.isdisjoint(text.encode())


def asked(answer: object, *, emitted: list[int] | None = None, **sampling) -> Sequence:
    return Sequence(
        id="a",
        token_ids=PROMPT + (emitted or []),
        prompt_tokens=len(PROMPT),
        sampling=Sampling(**{"max_tokens": 20_000, **sampling}),
        extra={"sim_answer": answer},
    )


def said(sequence: Sequence, vocabulary: Vocabulary | None = None) -> tuple[list[int], str | None]:
    settings = SimSettings(blocks=4096)
    line = replay([(0.0, sequence)], settings, vocabulary=vocabulary).timelines[0]
    assert line.error is None
    return line.ids, line.finish


def text_of(ids: list[int]) -> str:
    pipeline = TextPipeline(bundled_vocabulary().table, prompt_ids=PROMPT)
    return "".join(map(pipeline.push, ids)) + pipeline.finish()


@given(st.text(st.characters(exclude_categories=["Cs"]), max_size=60).filter(spellable))
def test_the_text_comes_out_as_it_went_in_and_then_the_answer_ends(text):
    ids, finish = said(asked(text))
    assert (ids[-1], finish) == (EOS, "stop")
    assert b"".join(bundled_vocabulary().table.token_bytes(token) for token in ids[:-1]) == text.encode()
    assert text_of(ids[:-1]) == text


def test_the_longest_token_is_taken():
    table = bundled_vocabulary().table
    pieces = [table.token_bytes(token) for token in said(asked("understanding the weather"))[0][:-1]]
    assert pieces == [b"understanding", b" the", b" weather"]


def test_tokens_are_the_same_whatever_was_emitted_before():
    whole, _ = said(asked('{"a": "日本 🙂"} <think>\n'))
    for cut in range(len(whole)):
        assert said(asked('{"a": "日本 🙂"} <think>\n', emitted=whole[:cut])) == (whole[cut:], "stop")


def test_max_tokens_cuts_it():
    ids, finish = said(asked("one two three", max_tokens=2))
    assert (text_of(ids), finish) == ("one two", "length")


def test_it_goes_on_with_words_where_it_may_not_end():
    script = said(asked("one two three"))[0][:-1]
    longer, finish = said(asked("one two three", min_tokens=10))
    assert (len(longer), longer[:3], longer[-1], finish) == (11, script, EOS, "stop")
    endless, finish = said(asked("one two three", ignore_eos=True, max_tokens=50))
    assert (len(endless), endless[:3], finish) == (50, script, "length")
    assert EOS not in endless
    assert endless[:10] == longer[:10]


def test_an_end_token_in_the_text_ends_it():
    ids, finish = said(asked("one<|im_end|>two"))
    assert (text_of(ids[:-1]), ids[-1], finish) == ("one", EOS, "stop")


def test_an_empty_text_ends_at_once():
    assert said(asked("")) == ([EOS], "stop")


def tokenizer_with(folder, *added: AddedToken, eos: str = "</s>") -> Vocabulary:
    tokens = ["Ġcat", "Ġdog", "Ġdogs", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": eos}))
    return Vocabulary.load(folder)


def test_added_tokens_are_found_by_their_text(tmp_path):
    vocabulary = tokenizer_with(
        tmp_path,
        AddedToken("<think>"),
        AddedToken("<thinking>"),
        AddedToken("</s>", special=True),
        AddedToken("<|tool|>", special=True),
    )
    spell = vocabulary.speller.spell
    by_text = {vocabulary.table.token_bytes(token).decode(): token for token in range(vocabulary.size - 4, vocabulary.size)}
    dogs = 2
    assert spell("<thinking> dogs<think><|tool|>", param="x") == [
        by_text["<thinking>"],
        dogs,
        by_text["<think>"],
        by_text["<|tool|>"],
    ]


@pytest.mark.parametrize("wrong", [1, None, ["text"], {"text": "x"}])
def test_anything_but_a_text_is_refused_by_name(wrong):
    with pytest.raises(RequestInvalid, match="sim_answer must be a text") as caught:
        answer_to(asked(wrong), bundled_vocabulary())
    assert caught.value.param == "sim_answer"


def test_a_text_that_cannot_be_spelled_is_refused_and_leaves_nothing_behind(tmp_path):
    scheduler = SimScheduler(SimSettings(), bundled_vocabulary())
    with pytest.raises(RequestInvalid, match="lone surrogate"):
        scheduler.submit(asked("a\ud800"), NO_FAULTS)
    assert scheduler.ids == []
    no_end = tokenizer_with(tmp_path, eos="[missing]")
    with pytest.raises(RequestInvalid, match="names no end token"):
        answer_to(asked("a"), no_end)
    words = Tokenizer(models.WordPiece(vocab={"[UNK]": 0, "cat": 1, "##s": 2}, unk_token="[UNK]"))
    words.decoder = decoders.WordPiece()
    words.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(UnsupportedByEngine, match="sim_answer"):
        answer_to(asked("cats", ignore_eos=True), Vocabulary.load(tmp_path))


def test_a_sequence_that_prescribes_nothing_answers_as_ever():
    plain = Sequence(id="p", token_ids=PROMPT, prompt_tokens=3, sampling=Sampling(max_tokens=30))
    assert said(plain)[0] == expected_ids(PROMPT, 30)


async def test_the_tables_for_spelling_are_made_beside_the_event_loop(monkeypatch):
    threads = []
    prepare = Speller.prepare

    def watched(speller: Speller) -> None:
        threads.append(threading.get_ident())
        prepare(speller)

    monkeypatch.setattr(Speller, "prepare", watched)
    engine = SimEngine()
    args = {"tokenizer_dir": str(BUNDLED_TOKENIZER)}  # read anew
    await engine.start(EngineConfig(model="sim", served_name="sim", args=args), lambda outputs: None)
    for name in ("a", "b"):
        sequence = msgspec.structs.replace(asked("text"), id=name)
        await engine.submit(sequence)
    await engine.submit(Sequence(id="plain", token_ids=[1], prompt_tokens=1, sampling=Sampling(max_tokens=1)))
    await engine.stop(1.0)
    assert len(threads) == 1
    assert threads[0] != threading.get_ident()


def test_the_first_rule_of_a_script_that_is_found_in_the_prompt_gives_the_answer(tmp_path):
    spell, table = bundled_vocabulary().speller.spell, bundled_vocabulary().table
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"when": "tool\n3 files", "say": "Three."}, {"when": r"(?i)list\b", "say": "ls"}]))
    rules = read_script(str(script))
    for prompt, answer in {"List them.": "ls", "List them.\ntool\n3 files": "Three.", "Listen.": None}.items():
        assert scripted(rules, table, spell(prompt, param="prompt")) == answer


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        (None, "No such file"),
        ("[{", "truncated"),
        ('[{"when": "a"}]', "missing required field `say`"),
        ('[{"when": "a", "say": "b", "then": "c"}]', "unknown field `then`"),
        ('[{"when": "(a", "say": "b"}]', r"'\(a' is not a pattern"),
        ('[{"when": 1, "say": "b"}]', "a pattern is a text, not 1"),
    ],
)
async def test_a_script_that_cannot_be_read_ends_the_start_and_is_named(tmp_path, text, wrong):
    script = tmp_path / "script.json"
    if text is not None:
        script.write_text(text)
    with pytest.raises(EngineStartFailed, match=rf"script='{script}': .*{wrong}"):
        await SimEngine().start(
            EngineConfig(model="sim", served_name="sim", args={"script": str(script)}), lambda outputs: None
        )


async def test_an_engine_answers_by_its_script_where_the_request_prescribes_nothing(tmp_path):
    script = tmp_path / "script.json"
    script.write_text(json.dumps([{"when": "", "say": "by the script"}]))
    said: dict[str, list[int]] = {"plain": [], "own": []}
    ended = asyncio.Event()

    def sink(outputs: Seq[Output]) -> None:
        for output in outputs:
            said[output.id] += output.ids
        if all(ids[-1:] == [EOS] for ids in said.values()):
            ended.set()

    engine = SimEngine()
    await engine.start(EngineConfig(model="sim", served_name="sim", args={"script": str(script)}), sink)
    plain = Sequence(id="plain", token_ids=PROMPT, prompt_tokens=3, sampling=Sampling(max_tokens=100))
    try:
        await engine.submit(plain)
        await engine.submit(msgspec.structs.replace(asked("its own", max_tokens=100), id="own"))
        await asyncio.wait_for(ended.wait(), 5)
    finally:
        await engine.stop(1.0)
    assert {name: text_of(ids[:-1]) for name, ids in said.items()} == {"plain": "by the script", "own": "its own"}


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
