"""Whose value a message of a store describes, also one that an older version, another tool or an attacker has written."""

from __future__ import annotations

import pytest

from headrace.broker.ingress.record_index import kept_record, record_key
from headrace.broker.ingress.response_store import TENANT, described_answer, stored_size
from headrace.jetstream.ports import StoredMessage


def described(data: bytes) -> StoredMessage:
    return StoredMessage("$O.hr_responses.M.cmVzcF8x", 7, data)


def test_an_answer_counts_for_the_tenant_of_its_description() -> None:
    held = described_answer(
        described(b'{"name":"resp_1","bucket":"b","nuid":"n","size":1000,"metadata":{"%s":"acme"}}' % TENANT.encode())
    )
    assert held == ("resp_1", "acme", stored_size(1000))


def test_an_answer_of_an_older_version_counts_for_a_tenant_without_a_name() -> None:
    held = described_answer(described(b'{"name":"resp_1","bucket":"b","nuid":"n","size":1}'))
    assert held is not None
    assert held.tenant == ""


def test_a_deleted_answer_counts_for_none() -> None:
    held = described_answer(described(b'{"name":"resp_1","bucket":"b","nuid":"n","deleted":true}'))
    assert held is not None
    assert (held.key, held.tenant) == ("resp_1", None)


@pytest.mark.parametrize("data", [b"", b"{", b'{"name":1}', b"[" * 100_000, b"\xff\xfe"])
def test_a_description_that_cannot_be_read_is_left_out(data: bytes) -> None:
    assert described_answer(described(data)) is None


def test_a_record_counts_for_the_tenant_in_its_key() -> None:
    key = record_key("chat", "acme", "a name/of.any kind")
    kept = kept_record(StoredMessage(f"$KV.hr_records.{key}", 1, b"value"))
    assert kept is not None
    assert (kept.key, kept.tenant) == (key, "acme")
    gone = kept_record(StoredMessage(f"$KV.hr_records.{key}", 2, b"", {"KV-Operation": "DEL"}))
    assert gone is not None
    assert gone.tenant is None
    assert kept_record(StoredMessage("$KV.hr_records.strange", 3, b"x")) is None
