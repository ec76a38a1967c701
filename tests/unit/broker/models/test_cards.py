"""A card that was not signed with the deployment's key is refused, counted, and never known."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs

from headrace.broker import metrics
from headrace.broker.codec import encode
from headrace.broker.errors import CardForged, CardKeyUnusable
from headrace.broker.models.cards import CardFile, check_signature, read_card_key, readable_card, signed
from tests.support.frontend.fakes import CARD

KEY, OTHER = b"k" * 32, b"o" * 32
SIGNED = signed(msgspec.structs.replace(CARD, files={"tokenizer.json": CardFile("d", "d", 1)}), KEY)


def test_a_card_that_was_signed_with_the_key_is_read() -> None:
    assert readable_card(CARD.pool, encode(SIGNED), signed_with=KEY) == SIGNED
    assert readable_card(CARD.pool, encode(SIGNED)) == SIGNED, "a frontend without the key takes every card"
    assert signed(CARD, b"") == CARD


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "another"},
        {"pool": "another"},
        {"namespace": "another"},
        {"files": {"tokenizer.json": CardFile("e", "e", 1)}},
        {"files": {**SIGNED.files, "chat_template.jinja": CardFile("t", "t", 1)}},
        {"template_kwargs": {"tools": []}},
        {"aliases": ["gpt"]},
        {"eos_token_ids": [1, 2, 3]},
        {"signature": b""},
        {"signature": bytes(32)},
    ],
    ids=lambda changed: next(iter(changed)),
)
def test_a_card_that_was_changed_since_is_refused(changed: dict[str, Any]) -> None:
    with pytest.raises(CardForged):
        check_signature(msgspec.structs.replace(SIGNED, **changed), KEY)


def test_adapters_come_and_go_without_the_key() -> None:
    check_signature(msgspec.structs.replace(SIGNED, adapters=["one", "two"]), KEY)


@pytest.mark.parametrize("card", [CARD, signed(CARD, OTHER)], ids=["unsigned", "signed-with-another-key"])
def test_a_forged_card_is_counted_and_said(card: Any) -> None:
    counter = metrics.FORGED.labels("card")
    before = counter._value.get()
    with capture_logs() as logs:
        assert readable_card(card.pool, encode(card), signed_with=KEY) is None
    assert counter._value.get() == before + 1
    assert [line["event"] for line in logs] == ["card.forged"]


def test_the_key_is_that_of_a_file_and_long_enough(tmp_path: Path) -> None:
    path = tmp_path / "key"
    path.write_bytes(KEY + b"\n")
    assert read_card_key(str(path)) == KEY
    assert read_card_key(None) == b""
    path.write_bytes(b"short")
    for unusable in (str(path), str(tmp_path / "none"), str(tmp_path)):
        with pytest.raises(CardKeyUnusable, match="key of model cards"):
            read_card_key(unusable)


@pytest.mark.parametrize(("key", "value"), [(CARD.pool, b"\xc1"), ("another", encode(CARD))])
def test_a_card_that_cannot_be_used_is_counted(key: str, value: bytes) -> None:
    counter = metrics.MALFORMED.labels("card")
    before = counter._value.get()
    assert readable_card(key, value) is None
    assert counter._value.get() == before + 1


def test_a_card_under_its_own_pool_is_read() -> None:
    assert readable_card(CARD.pool, encode(CARD)) == CARD
