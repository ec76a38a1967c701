"""What is remembered of earlier prompts changes no prompt."""

from __future__ import annotations

import copy
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.broker.blocks import block_chain
from headrace.broker.codec import pack_u64
from headrace.broker.models.cards import ModelCard
from headrace.frontend.prompts.prompt_encoder import ByteLru, LengthLimit, PromptCache, PromptEncoder
from headrace.frontend.prompts.text_encoder import SplitPoints, cut_tokens
from tests.support.frontend.tokenizers import MAKES, SPECIAL, make

LIMIT = LengthLimit(context_length=1_000_000, wanted=1, truncate=None, param="prompt")
CARD = ModelCard(model="m", pool="m-0", context_length=1_000_000, block_size=4)
ODD = ("<l>", "<r>", "<w>", "<n>", "<ab>", "b><c", "<c>", " <d>", "<d>", "  ", "<f>", "<f>g", "xx", "<ok>")
NO_SURROGATES = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
BITS = st.one_of(
    st.sampled_from(SPECIAL),
    st.sampled_from(ODD),
    st.sampled_from(
        [" ", "\n", "\t", "a", "x", "<", "<|im_", "hello world", " hello", "e\u0301", "１", "日本", "👩‍👩‍👧", "\x00", "▁"]
    ),
    NO_SURROGATES,
)
TEXTS = st.lists(BITS, min_size=1, max_size=14).map("".join).filter(bool)


@cache
def tokenizer(name: str) -> Tokenizer:
    return Tokenizer.from_str(make(name).decode())


@cache
def boundaries(name: str) -> SplitPoints:
    return SplitPoints(tokenizer(name))


def encoder(name: str, cache: PromptCache | None, pool: ThreadPoolExecutor, *, inline_bytes: int = 0) -> PromptEncoder:
    return PromptEncoder(make(name), CARD, executor=pool, inline_bytes=inline_bytes, cache=cache)


@pytest.fixture(scope="module")
def pool() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2)


@pytest.mark.parametrize("name", MAKES)
@settings(deadline=None)  # some examples load a tokenizer
@given(text=TEXTS)
def test_pieces_give_the_ids_of_the_whole(name: str, text: str) -> None:
    pieces = boundaries(name).split(text)
    assert "".join(pieces) == text
    apart = [i for piece in pieces for i in tokenizer(name).encode(piece, add_special_tokens=False).ids]
    assert apart == tokenizer(name).encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("name", MAKES)
def test_every_tokenizer_of_chats_can_be_cut_at_its_markers(name: str) -> None:
    assert {"<|im_start|>", "<|im_end|>"} <= set(cut_tokens(tokenizer(name)))
    assert len(boundaries(name).split("<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n")) == 3


def test_a_tokenizer_that_reads_special_tokens_as_text_is_never_cut() -> None:
    blind = Tokenizer.from_str(make("byte BPE").decode())
    blind.encode_special_tokens = True
    assert SplitPoints(blind).split("<s>a<s>b") == ["<s>a<s>b"]


@pytest.mark.parametrize("offset", range(-14, 3))
def test_markers_on_the_edge_of_a_search_window_are_found(offset: int) -> None:
    before = "a" * ((1 << 16) + offset)
    pieces = boundaries("SmolLM2").split(before + "<|im_start|>b<|im_end|>")
    assert pieces == [before, "<|im_start|>b", "<|im_end|>"]


@pytest.mark.parametrize("name", MAKES)
@settings(deadline=None, max_examples=30)
@given(turns=st.lists(TEXTS, min_size=1, max_size=6), salt=st.none() | st.just("salt"))
def test_a_growing_conversation_costs_less_and_says_the_same(
    name: str, turns: list[str], salt: str | None, pool: ThreadPoolExecutor
) -> None:
    cache = PromptCache(1 << 20)
    cached, plain = shared_encoder(name, pool, cache), shared_encoder(name, pool, None)
    for count in range(1, len(turns) + 1):
        text = "".join(f"<|im_start|>user\n{turn}<|im_end|>\n" for turn in turns[:count])
        ours = cached.encode_now(text, add_special_tokens=False, limit=LIMIT, salt=salt)
        assert ours == plain.encode_now(text, add_special_tokens=False, limit=LIMIT, salt=salt)
        assert ours.hashes == pack_u64(block_chain(ours.packed, CARD.block_size, salt=salt))


@cache
def _bare(name: str, pool: ThreadPoolExecutor) -> PromptEncoder:
    return encoder(name, None, pool)


def shared_encoder(name: str, pool: ThreadPoolExecutor, cache: PromptCache | None) -> PromptEncoder:
    """Loading the bundled tokenizer takes long, so the memory is changed instead of the encoder."""
    twin = copy.copy(_bare(name, pool))
    twin._prompt_cache = cache
    return twin


def test_the_next_turn_encodes_only_what_is_new(pool: ThreadPoolExecutor) -> None:
    told: list[tuple[int, int]] = []
    asked: list[list[str]] = []
    cache = PromptCache(1 << 20, on_reuse=lambda reused, encoded: told.append((reused, encoded)))
    ours = encoder("byte BPE", cache, pool)
    encode = ours._encode_pieces

    def counting(pieces: list[str], *, limit: LengthLimit) -> list[bytes]:
        asked.append(pieces)
        return encode(pieces, limit=limit)

    ours._encode_pieces = counting  # type: ignore[method-assign]
    first = "<|im_start|>system\nsea<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    ours.encode_now(first, add_special_tokens=False, limit=LIMIT)
    before = ours.encode_now(first, add_special_tokens=False, limit=LIMIT).tokens
    whole = ours.encode_now(first + "<|im_start|>user\nyo<|im_end|>", add_special_tokens=False, limit=LIMIT).tokens
    assert asked[1:] == [["<|im_start|>user\nyo", "<|im_end|>"]]
    assert told == [(0, before), (before, 0), (before, whole - before)]


def test_the_memory_keeps_to_its_bounds_and_forgets_what_was_not_used() -> None:
    lru = ByteLru(2000)
    for i in range(50):
        lru.put_many([(i, b"x", 200)])
        lru.get_many([0])
        assert lru.size <= 2000
    assert len(lru) == 4
    assert [found is not None for found in lru.get_many([0, 46, 47, 48, 49])] == [True, False, True, True, True]
    lru.put_many([("huge", b"x", 5000)])
    assert (lru.get_many(["huge"]), len(lru)) == ([None], 4)
