"""Two libraries make token ids; whichever does, they are the same ids."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from headrace.broker.codec import unpack_u32
from headrace.frontend.errors import ModelUnusable
from headrace.frontend.metrics import Metrics
from headrace.frontend.prompts import text_encoder
from headrace.frontend.prompts.model_cache import ModelCache
from headrace.frontend.prompts.text_encoder import TextEncoder
from headrace.frontend.settings import FrontendSettings
from tests.support.frontend.fakes import FILES, MODEL, FakeModels
from tests.support.frontend.tokenizers import MAKES, make
from tests.unit.frontend.prompts.test_prompt_cache import TEXTS

LLAMA_3 = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
BYTE_LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
SPLIT = {"type": "Split", "behavior": "Isolated", "invert": False}


def split_by(pattern: str, normalizer: str | None = None) -> bytes:
    """The bundled vocabulary behind another family's way to split texts."""
    made: dict[str, Any] = json.loads(make("SmolLM2"))
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [{**SPLIT, "pattern": {"Regex": pattern}}, BYTE_LEVEL]}
    made["normalizer"] = normalizer and {"type": normalizer}
    return json.dumps(made).encode()


FAMILIES = {
    **{name: (lambda name=name: make(name)) for name in MAKES},
    "Llama 3": lambda: split_by(LLAMA_3),
    "Qwen": lambda: split_by(LLAMA_3.replace("{1,3}", ""), "NFC"),
}
needs_fast = pytest.mark.skipif(text_encoder.fastokens is None, reason="fastokens has no wheel for this machine")


@cache
def encoder(family: str) -> TextEncoder:
    made = TextEncoder(FAMILIES[family](), name=family)
    made.use_fast_tokenizer()
    return made


@pytest.mark.deep
@pytest.mark.parametrize("family", FAMILIES)
@settings(deadline=None)  # the first example loads a tokenizer
@given(texts=st.lists(TEXTS, min_size=1, max_size=3), special=st.booleans())
@example(texts=["It's 12345 o'clock,  WE'LL see\r\n\n\tK ſ ı", "e\u0301 ﬁ Ⅷ <s>", "\x13\x1a 👩‍👩‍👧"], special=False)
def test_ids_are_those_of_the_reference(family: str, texts: list[str], special: bool) -> None:
    ours = encoder(family).encode(texts, special=special)
    reference = encoder(family).reference
    assert list(map(unpack_u32, ours)) == [reference.encode(text, add_special_tokens=special).ids for text in texts]


@needs_fast
@pytest.mark.slow
def test_byte_level_tokenizers_are_fast_and_others_say_why_not() -> None:
    with capture_logs() as logs:
        fast = {family for family in FAMILIES if encoder.__wrapped__(family).fast}
    assert fast == {"SmolLM2", "byte BPE", "byte BPE with prefix space", "odd added tokens", "Llama 3", "Qwen"}
    slow = {log["model"]: log["reason"] for log in logs if log["event"] == "tokenizer.slow"}
    assert slow.keys() == FAMILIES.keys() - fast
    assert "Metaspace" in slow["SentencePiece, first"]


@needs_fast
def test_words_that_the_configuration_calls_special_are_so_for_both() -> None:
    made = TextEncoder(make("byte BPE"), name="m", special_tokens=["hello", "nowhere"])
    before = made.encode(["a hello b"], special=False)
    made.use_fast_tokenizer()
    assert made.fast
    assert made.encode(["a hello b"], special=False) == before
    assert made.reference.token_to_id("hello") in unpack_u32(before[0])


@needs_fast
def test_a_text_that_the_fast_one_refuses_is_encoded_and_counted() -> None:
    """The bundled vocabulary has no token for this byte: `tokenizers` leaves it out, `fastokens` raises."""
    refused = []
    made = TextEncoder(make("SmolLM2"), name="m")
    made.use_fast_tokenizer()
    made.on_refused = lambda: refused.append(1)
    assert unpack_u32(made.encode(["a\x13b"], special=False)[0]) == made.reference.encode("a\x13b").ids
    assert len(refused) == 1
    made.encode(["ab"], special=False)
    assert len(refused) == 1


@needs_fast
@pytest.mark.slow
def test_one_that_understands_the_file_otherwise_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    real = text_encoder.fastokens.Tokenizer

    class Misreading:
        """Takes no notice of how the file wants texts to be split."""

        @staticmethod
        def from_json_str(text: str) -> Any:
            return real.from_json_str(json.dumps({**json.loads(text), "pre_tokenizer": BYTE_LEVEL}))

    made = TextEncoder(make("SmolLM2"), name="m")
    monkeypatch.setattr(text_encoder.fastokens, "Tokenizer", Misreading)
    with capture_logs() as logs:
        made.use_fast_tokenizer()
    assert not made.fast
    assert "has other ids for" in logs[0]["reason"]


def test_without_the_fast_library_the_reference_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_encoder, "fastokens", None)
    made = TextEncoder(make("SmolLM2"), name="m")
    with capture_logs() as logs:
        made.use_fast_tokenizer()
    assert not made.fast
    assert logs[0]["reason"] == "fastokens is not installed"
    assert unpack_u32(made.encode(["Hello"], special=False)[0]) == made.reference.encode("Hello").ids


@needs_fast
def test_half_a_character_is_no_text() -> None:
    with pytest.raises(UnicodeEncodeError):
        encoder("SmolLM2").encode(["a\ud800"], special=False)


def test_no_tokenizer_at_all_is_named() -> None:
    with pytest.raises(ModelUnusable, match="the tokenizer of 'm' cannot be loaded"):
        TextEncoder(b"{}", name="m")


@needs_fast
async def test_a_loaded_model_becomes_fast_by_itself_and_counts_what_is_refused() -> None:
    models, metrics = FakeModels(), Metrics()
    models.served[MODEL].files = {**FILES, "tokenizer.json": make("SmolLM2")}
    model_cache = ModelCache(models, FrontendSettings(), metrics)
    encoder = (await model_cache.get(MODEL)).encoder
    assert model_cache._speedup is not None
    await model_cache._speedup
    assert encoder._text.fast
    encoder._text.encode(["\x13"], special=False)
    assert b"headrace_frontend_slow_prompts_total 1.0" in metrics.render()
    model_cache.close()


async def test_the_fast_library_can_be_left_out() -> None:
    models = FakeModels()
    models.served[MODEL].files = {**FILES, "tokenizer.json": make("SmolLM2")}
    model_cache = ModelCache(models, FrontendSettings(fast_tokenizer=False))
    encoder = (await model_cache.get(MODEL)).encoder
    assert model_cache._speedup is None
    assert not encoder._text.fast
    model_cache.close()
