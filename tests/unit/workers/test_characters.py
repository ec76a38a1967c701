"""Whatever the pieces, no half character is ever shown, and none is held longer than it needs."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from headrace.workers.detokenize import TextPipeline, TokenTable

ASSETS = Path(__file__).parents[3] / "workers" / "assets" / "smollm2"
SMOLLM2 = Tokenizer.from_file(str(ASSETS / "tokenizer.json"))
BY_TABLE = TokenTable.load(ASSETS)
BY_LIBRARY = TokenTable(
    pieces=(),
    texts=(),
    special=BY_TABLE.special,
    decode=lambda ids, skip: str(SMOLLM2.decode(ids, skip_special_tokens=skip)),
)
BYTES = {piece[0]: i for i, piece in enumerate(BY_TABLE.pieces) if len(piece) == 1}
SPELLED = {byte for byte in range(256) if byte in BYTES}
CHARACTERS = st.characters(exclude_categories=["Cs"]).filter(lambda c: c != "\ufffd" and set(c.encode()) <= SPELLED)
JOINED = st.sampled_from(["👩‍👩‍👧‍👦", "🏴󠁧󠁢󠁳󠁣󠁴󠁿", "e\u0301", "नि", "🇳🇴"]).filter(lambda text: set(text.encode()) <= SPELLED)


@pytest.mark.parametrize("table", [BY_TABLE, BY_LIBRARY], ids=["by table", "by the library"])
@settings(deadline=None)
@given(text=st.lists(CHARACTERS | JOINED, max_size=12).map("".join))
def test_characters_spelled_in_bytes_come_out_whole_and_at_once(table: TokenTable, text: str) -> None:
    pipeline = TextPipeline(table, prompt_ids=[40])
    for character in text:
        *before, last = (BYTES[byte] for byte in character.encode())
        assert [pipeline.push(token) for token in before] == [""] * len(before)
        assert pipeline.push(last) == character
    assert pipeline.finish() == ""


@pytest.mark.parametrize("table", [BY_TABLE, BY_LIBRARY], ids=["by table", "by the library"])
@settings(deadline=None)
@given(data=st.lists(st.sampled_from(sorted(SPELLED)).map(lambda b: bytes([b])) | CHARACTERS.map(str.encode), max_size=24))
def test_bytes_in_any_order_come_out_as_the_text_they_are(table: TokenTable, data: list[bytes]) -> None:
    pipeline = TextPipeline(table, prompt_ids=[40])
    whole = b"".join(data).decode(errors="replace")
    shown = ""
    for byte in b"".join(data):
        shown += pipeline.push(BYTES[byte])
        assert whole.startswith(shown)
    assert shown + pipeline.finish() == whole
