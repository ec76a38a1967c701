"""The text pipeline: detokenising and stop strings."""

from __future__ import annotations

import json
import shutil
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from headrace.workers.detokenize import StopMatcher, TextPipeline, TokenTable, first_token
from headrace.workers.errors import ModelUnavailable
from headrace.workers.tokens import token_table

ASSETS = Path(__file__).parents[3] / "workers" / "assets" / "smollm2"


@pytest.fixture(scope="module")
def smollm2() -> tuple[Tokenizer, TokenTable]:
    return Tokenizer.from_file(str(ASSETS / "tokenizer.json")), TokenTable.load(ASSETS)


def run(table: TokenTable, ids: list[int], **options) -> str:
    pipeline = TextPipeline(table, prompt_ids=options.pop("prompt_ids", []), **options)
    return "".join(map(pipeline.push, ids)) + pipeline.finish()


def save(tokenizer: Tokenizer, folder: Path) -> TokenTable:
    tokenizer.save(str(folder / "tokenizer.json"))
    return TokenTable.load(folder)


# -- the bundled tokenizer -----------------------------------------------------------------------------------


def test_the_bundled_tokenizer_is_smollm2(smollm2):
    tokenizer, table = smollm2
    prompt = "<|im_start|>user\nHi there, 2 cafés 🙂<|im_end|>\n"
    encoded = tokenizer.encode(prompt, add_special_tokens=False)
    assert encoded.tokens[0] == "<|im_start|>"
    assert encoded.ids[0] == 1
    assert encoded.ids[-2] == 2
    assert tokenizer.get_vocab_size() == 49152 == len(table.pieces)
    assert run(table, encoded.ids, skip_special_tokens=False) == prompt
    assert table.special == set(range(17))


def byte_tokens(table: TokenTable) -> dict[int, int]:
    return {piece[0]: i for i, piece in enumerate(table.pieces) if len(piece) == 1}


token_ids = st.one_of(
    st.integers(0, 49151),
    st.integers(0, 16),
    st.sampled_from(["🙂", "é", "漢", "👩‍👩‍👧", "\xff"]),
    st.integers(0x80, 0xFF).map(lambda byte: -byte),  # a lone byte,
)


@given(st.lists(token_ids, max_size=30), st.booleans())
def test_pushed_pieces_join_to_what_the_library_decodes(smollm2, drawn, skip):
    tokenizer, table = smollm2
    singles = byte_tokens(table)
    ids = []
    for item in drawn:
        if isinstance(item, str):
            ids += [singles[byte] for byte in item.encode() if byte in singles]
        else:
            ids.append(singles.get(-item, 0) if item < 0 else item)
    assert run(table, ids, skip_special_tokens=skip) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_a_character_split_over_tokens_comes_out_whole(smollm2):
    _, table = smollm2
    singles = byte_tokens(table)
    pipeline = TextPipeline(table, prompt_ids=[])
    assert [pipeline.push(singles[byte]) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]


def test_a_skipped_special_token_does_not_break_a_character(smollm2):
    _, table = smollm2
    singles = byte_tokens(table)
    first, second = (singles[byte] for byte in "é".encode())
    assert run(table, [first, 1, second], skip_special_tokens=True) == "é"


def test_a_character_begun_in_the_prompt_is_completed(smollm2):
    _, table = smollm2
    first, second = (byte_tokens(table)[byte] for byte in "é".encode())
    assert run(table, [second], prompt_ids=[40, first]) == "é"


def test_ids_beyond_the_tokenizer_add_nothing(smollm2):
    _, table = smollm2
    assert run(table, [49152, 60000]) == ""
    assert table.token_bytes(60000) == b""


def test_token_bytes_are_raw(smollm2):
    _, table = smollm2
    assert table.token_bytes(byte_tokens(table)[0xF0]) == b"\xf0"
    assert table.token_bytes(1) == b"<|im_start|>"


def test_a_process_reads_the_same_file_once(tmp_path):
    shutil.copy(ASSETS / "tokenizer.json", tmp_path)
    table = token_table(tmp_path)
    assert token_table(str(tmp_path)) is table
    save(Tokenizer(models.WordLevel({"cat": 0})), tmp_path)
    assert token_table(tmp_path) is not table


def test_a_missing_or_damaged_tokenizer_is_named(tmp_path):
    with pytest.raises(ModelUnavailable, match=r"tokenizer\.json"):
        TokenTable.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text('{"model": 3}')
    with pytest.raises(ModelUnavailable, match="is not a tokenizer"):
        TokenTable.load(tmp_path)


# -- other families ------------------------------------------------------------------------------------------

PIECES = ["<unk>", "<s>", "</s>", "▁the", "▁cat", "s", "▁", "é", "▁▁x", "漢", "▁sat", "."]


def sentencepiece(decoder: decoders.Decoder) -> Tokenizer:
    vocabulary = {piece: i for i, piece in enumerate([*PIECES, *(f"<0x{byte:02X}>" for byte in range(256))])}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken("<s>"), AddedToken("</s>")])
    return tokenizer


LLAMA2 = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(content=" ", left=1, right=0)]
)
GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])


@pytest.fixture(scope="module", params=["llama2", "gemma", "metaspace"])
def family(request, tmp_path_factory) -> tuple[Tokenizer, TokenTable]:
    decoder = {"llama2": LLAMA2, "gemma": GEMMA, "metaspace": decoders.Metaspace()}[request.param]
    tokenizer = sentencepiece(decoder)
    return tokenizer, save(tokenizer, tmp_path_factory.mktemp(request.param))


whole_bytes = st.sampled_from(["🙂", "ß"]).map(lambda text: [12 + byte for byte in text.encode()])
groups = st.one_of(st.integers(1, 11).map(lambda i: [i]), whole_bytes)


@given(st.lists(groups, max_size=12), st.lists(groups, max_size=6), st.booleans())
def test_an_answer_is_what_it_adds_to_its_prompt(family, answer, prompt, skip):
    tokenizer, table = family
    assert table.decode is None
    prompt_ids, ids = list(chain.from_iterable(prompt)), list(chain.from_iterable(answer))
    if tokenizer.decoder.__class__.__name__ == "Metaspace":  # knows no byte tokens
        prompt_ids, ids = [i for i in prompt_ids if i < 12], [i for i in ids if i < 12]
    before, whole = (tokenizer.decode(x, skip_special_tokens=skip) for x in (prompt_ids, prompt_ids + ids))
    assert run(table, ids, prompt_ids=prompt_ids, skip_special_tokens=skip) == whole[len(before) :]


@pytest.mark.parametrize("data", [b"\xf0\x9f", b"\xff", b"a\xc3"])
def test_bytes_that_are_no_character_become_a_replacement(tmp_path, data):
    table = save(sentencepiece(GEMMA), tmp_path)
    assert run(table, [12 + byte for byte in data]) == data.decode(errors="replace")


WORDS = ["[UNK]", "[CLS]", "the", "cat", "##s", "sat", ".", "##é", "'", "##t"]


@pytest.fixture(scope="module")
def wordpiece(tmp_path_factory) -> tuple[Tokenizer, TokenTable]:
    tokenizer = Tokenizer(models.WordPiece(vocab={word: i for i, word in enumerate(WORDS)}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens([AddedToken("[CLS]")])
    return tokenizer, save(tokenizer, tmp_path_factory.mktemp("wordpiece"))


@given(st.lists(st.integers(1, 9), max_size=40), st.lists(st.integers(2, 9), min_size=1, max_size=20), st.booleans())
def test_a_tokenizer_without_a_table_is_asked_over_a_window(wordpiece, ids, prompt_ids, skip):
    tokenizer, table = wordpiece
    assert table.decode is not None
    before, whole = (tokenizer.decode(x, skip_special_tokens=skip) for x in (prompt_ids, prompt_ids + ids))
    assert run(table, ids, prompt_ids=prompt_ids, skip_special_tokens=skip) == whole[len(before) :]


def test_the_window_gives_no_half_characters(smollm2):
    tokenizer, table = smollm2
    slow = TokenTable(
        pieces=(), texts=(), special=table.special, decode=lambda ids, skip: tokenizer.decode(ids, skip_special_tokens=skip)
    )
    singles = byte_tokens(table)
    pipeline = TextPipeline(slow, prompt_ids=[40])
    assert [pipeline.push(singles[byte]) for byte in "a🙂b".encode()] == ["a", "", "", "", "🙂", "b"]
    assert pipeline.push(singles[0xC3]) == ""
    assert pipeline.finish() == "\ufffd"


def test_the_window_neither_waits_nor_grows_without_end(smollm2):
    tokenizer, table = smollm2
    asked: list[int] = []

    def decode(ids: list[int], skip: bool) -> str:
        asked.append(len(ids))
        return tokenizer.decode(ids, skip_special_tokens=skip)

    slow = TokenTable(pieces=(), texts=(), special=table.special, decode=decode)
    pipeline = TextPipeline(slow, prompt_ids=[40] * 1000)
    lone = byte_tokens(table)[0xC3]
    assert [pipeline.push(lone) for _ in range(8)] == [""] * 3 + ["\ufffd"] * 5
    assert "".join(pipeline.push(40) for _ in range(1000)) == "\ufffd" * 3 + tokenizer.decode([40] * 1000)
    assert max(asked) <= 16


# -- stop strings --------------------------------------------------------------------------------------------


def cut(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    found = sorted((text.find(stop), len(stop), stop) for stop in stops if stop and stop in text)
    if not found:
        return text, None
    start, length, stop = found[0]
    return text[: start + (length if include else 0)], stop


small_text = st.text("abc", max_size=12)


@settings(max_examples=100)
@given(st.lists(small_text, max_size=12), st.lists(st.text("abc", max_size=5), max_size=4), st.booleans())
def test_text_is_cut_at_the_first_stop_string_however_it_is_cut_into_pieces(pieces, stops, include):
    matcher = StopMatcher(stops, include_stop=include)
    released = "".join(map(matcher.push, pieces)) + matcher.finish()
    assert (released, matcher.stopped) == cut("".join(pieces), stops, include)


@given(st.lists(small_text, max_size=12), st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4))
def test_nothing_is_shown_that_may_be_part_of_a_stop_string_and_nothing_else_held(pieces, stops):
    matcher = StopMatcher(stops, include_stop=False)
    shown, seen = "", ""
    for piece in pieces:
        shown += matcher.push(piece)
        seen += piece
        if matcher.stopped is not None:
            break
        starts = [n for n in range(len(seen)) if any(s.startswith(seen[n:]) and s != seen[n:] for s in stops)]
        inside = [seen.find(s) for s in stops if s in seen]
        assert len(shown) == min([*starts, *inside, len(seen)])


def test_an_earlier_match_still_open_wins_when_it_completes():
    matcher = StopMatcher(["abcd", "bc"], include_stop=False)
    assert matcher.push("xabc") == "x"
    assert matcher.stopped is None
    assert matcher.push("d!") == ""
    assert matcher.stopped == "abcd"


def test_a_later_match_counts_when_the_earlier_one_comes_to_nothing():
    matcher = StopMatcher(["abcd", "bc"], include_stop=True)
    assert matcher.push("xabc") + matcher.push("e") == "xabc"
    assert matcher.stopped == "bc"
    assert matcher.push("more") + matcher.finish() == ""


def test_long_and_repetitive_stop_strings_stay_linear():
    matcher = StopMatcher(["a" * 20_000 + "b"], include_stop=False)
    released = "".join(matcher.push("aaaa") for _ in range(10_000))
    assert len(released) == 20_000
    assert len(released + matcher.finish()) == 40_000


# -- both together -------------------------------------------------------------------------------------------


@given(st.lists(st.integers(17, 49151), max_size=30), st.lists(st.text(" aeiou\ufffd", max_size=2), max_size=3), st.booleans())
def test_the_pipeline_cuts_the_decoded_text(smollm2, ids, stop, include):
    tokenizer, table = smollm2
    assert run(table, ids, stop=stop, include_stop=include) == cut(tokenizer.decode(ids), stop, include)[0]


@given(st.lists(st.integers(0, 49151), max_size=30), st.integers(0, 30), st.lists(st.text(" aeiou", max_size=2), max_size=3))
def test_a_replayed_prefix_leads_to_the_same_text(smollm2, ids, split, stop):
    _, table = smollm2
    through, replayed = (TextPipeline(table, prompt_ids=[5], stop=stop) for _ in range(2))
    expected = [through.push(i) for i in ids]
    for i in ids[:split]:
        replayed.push(i)
    assert [replayed.push(i) for i in ids[split:]] == expected[split:]
    assert replayed.finish() == through.finish()
    assert replayed.stopped == through.stopped


def test_stop_strings_wait_for_the_minimum_of_tokens(smollm2):
    tokenizer, table = smollm2
    ids = tokenizer.encode("stop stop now").ids
    assert run(table, ids, stop=["stop"], min_tokens=1) == "stop "


VOCAB = {"a": 0, "b": 1, "<s>": 7}
FILES = dict[str, Any]


def write(folder: Path, files: FILES) -> Path:
    for name, content in files.items():
        (folder / name).write_text(content if isinstance(content, str) else json.dumps(content))
    return folder


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        pytest.param(
            {
                "tokenizer_config.json": {"bos_token": "<bos>"},
                "tokenizer.json": {"added_tokens": [{"id": 5, "content": "<bos>"}], "model": {"vocab": VOCAB}},
                "config.json": {"bos_token_id": 9},
            },
            5,
            id="an added token; the tokenizer's word goes before the configuration's",
        ),
        pytest.param(
            {"tokenizer_config.json": {"bos_token": {"content": "<s>"}}, "tokenizer.json": {"model": {"vocab": VOCAB}}},
            7,
            id="a token of the vocabulary, in the older form",
        ),
        pytest.param(
            {"special_tokens_map.json": {"bos_token": "b"}, "tokenizer.json": {"model": {"vocab": [["a", 0.1], ["b", 0.2]]}}},
            1,
            id="a Unigram vocabulary",
        ),
        pytest.param({"config.json": {"bos_token_id": 9}}, 9, id="of the configuration"),
        pytest.param(
            {"generation_config.json": {"bos_token_id": 8}, "config.json": {"bos_token_id": 9}}, 8, id="of the generation"
        ),
        pytest.param(
            {"tokenizer_config.json": {"bos_token": None}, "tokenizer.json": {"model": {"vocab": VOCAB}}}, 1, id="none"
        ),
        pytest.param({"config.json": {"bos_token_id": 999}}, 1, id="outside the vocabulary"),
        pytest.param({"config.json": {"bos_token_id": True}}, 1, id="no number"),
        pytest.param({"tokenizer_config.json": "{", "config.json": "[]"}, 1, id="damaged files"),
        pytest.param({}, 1, id="nothing"),
    ],
)
def test_it_is_found(tmp_path: Path, files: FILES, expected: int) -> None:
    assert first_token(write(tmp_path, files), vocab_size=100) == expected


def test_a_vocabulary_of_one_token_has_only_that() -> None:
    assert first_token("/nowhere", vocab_size=1) == 0
