"""The texts of keys."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from headrace.broker.keys import (
    CLIENT_SCOPES,
    KeyInvalid,
    KeyRecord,
    KeyStore,
    KeyUnknown,
    Limits,
    digest_of,
    new_key_id,
    new_key_text,
    public_id,
    read_key,
)
from headrace.jetstream.subjects import Subjects
from tests.support.memory_store import MemoryMessaging


def test_a_key_names_its_public_id_and_no_other_text_does() -> None:
    key_id = new_key_id()
    text = new_key_text(key_id)
    assert public_id(text) == key_id
    for other in ("", "sk-abc", text[:-1], text + "x", f"hr_sk_{key_id}_"):
        assert public_id(other) is None


def test_keys_differ_and_only_equal_ones_have_equal_hashes() -> None:
    texts = {new_key_text("abcdefgh") for _ in range(50)}
    assert len(texts) == len({digest_of(text.encode()) for text in texts}) == 50


def wish(**more: Any) -> KeyRecord:
    values = {"id": "", "name": "ci", "tenant": "acme", "hashes": [], "scopes": list(CLIENT_SCOPES), "created": 0.0, **more}
    return KeyRecord(**values)


def store() -> tuple[KeyStore, MemoryMessaging]:
    messaging: Any = MemoryMessaging()
    return KeyStore(messaging, Subjects("hr"), wall=messaging.clock), messaging


async def test_what_is_stored_has_the_hash_and_not_the_key() -> None:
    keys, messaging = store()
    record, text = await keys.create(wish())
    entry = await messaging.bucket("hr_keys").get(record.id)
    assert entry is not None
    assert text.encode() not in entry.value
    assert text.split("_", 3)[3].encode()[:20] not in entry.value
    assert digest_of(text.encode()) in entry.value
    assert read_key(record.id, entry.value) == record == (await keys.all())[0]


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"name": ""}, "name"),
        ({"name": "a\nb"}, "name"),
        ({"tenant": ""}, "tenant"),
        ({"scopes": ["generate", "everything"]}, "everything"),
        ({"scopes": []}, "scope"),
        ({"limits": Limits(concurrent=-1)}, "concurrent"),
        ({"models": ["a"]}, "batches"),
    ],
)
async def test_a_wish_that_makes_no_sense_is_refused_by_name(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(KeyInvalid, match=word):
        await store()[0].create(wish(**changes))


async def test_a_revoked_key_stays_in_the_list_and_cannot_be_rotated() -> None:
    keys, messaging = store()
    record, _ = await keys.create(wish())
    revoked = await keys.revoke(record.id)
    assert revoked.state(messaging.clock()) == "revoked"
    assert await keys.all() == [revoked] == [await keys.revoke(record.id)]
    with pytest.raises(KeyInvalid, match="revoked"):
        await keys.rotate(record.id, grace_s=0)


async def test_a_rotated_key_keeps_its_old_secret_only_as_long_as_asked() -> None:
    keys, messaging = store()
    record, old = await keys.create(wish())
    rotated, new = await keys.rotate(record.id, grace_s=60)
    assert [(h.sha256, h.until) for h in rotated.hashes] == [
        (digest_of(new.encode()), 0.0),
        (digest_of(old.encode()), messaging.clock() + 60),
    ]
    at_once, _ = await keys.rotate(record.id, grace_s=0)
    assert len(at_once.hashes) == 1


async def test_a_key_is_found_by_id_or_by_a_name_that_only_it_has() -> None:
    keys, _ = store()
    one, _ = await keys.create(wish(name="one"))
    twin, _ = await keys.create(wish(name="twin"))
    await keys.create(wish(name="twin"))
    assert await keys.find("one") == await keys.find(one.id) == one
    with pytest.raises(KeyUnknown, match=twin.id):
        await keys.find("twin")
    with pytest.raises(KeyUnknown, match="nobody-has"):
        await keys.find("nobody-has")


def test_an_unreadable_record_and_one_under_another_id_are_no_keys() -> None:
    assert read_key("a", b"\xc1") is None
    record = wish(id="b")
    assert read_key("a", msgspec.msgpack.encode(record)) is None
