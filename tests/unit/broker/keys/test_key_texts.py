"""The texts of keys."""

from __future__ import annotations

from headrace.broker.keys.key_texts import digest_of, new_key_id, new_key_text, public_id


def test_a_key_names_its_public_id_and_no_other_text_does() -> None:
    key_id = new_key_id()
    text = new_key_text(key_id)
    assert public_id(text) == key_id
    for other in ("", "sk-abc", text[:-1], text + "x", f"hr_sk_{key_id}_"):
        assert public_id(other) is None


def test_keys_differ_and_only_equal_ones_have_equal_hashes() -> None:
    texts = {new_key_text("abcdefgh") for _ in range(50)}
    assert len(texts) == len({digest_of(text.encode()) for text in texts}) == 50
