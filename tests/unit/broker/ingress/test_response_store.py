"""Shares of tenants: the largest makes room with its oldest, and who has no more than its part loses nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.ingress.response_store import TENANT, StoreShares, described_answer, kept_record, record_key, stored_size
from headrace.jetstream.ports import StoredMessage


def test_the_largest_makes_room_with_its_oldest() -> None:
    shares = StoreShares()
    for i in range(4):
        shares.keep(f"a{i}", "a", 10)
    for i in range(2):
        shares.keep(f"b{i}", "b", 10)
    assert [victim.key for victim in shares.take(20, most=9)] == ["a0", "a1"]
    assert {victim.tenant for victim in shares.take(20, most=9)} == {"a", "b"}
    assert (shares.bytes_of("a"), shares.bytes_of("b"), len(shares)) == (10, 10, 2)


def test_a_value_that_was_written_again_is_the_newest_and_counts_once() -> None:
    shares = StoreShares()
    for key, size in (("one", 5), ("two", 5), ("one", 7)):
        shares.keep(key, "t", size)
    assert shares.bytes_of("t") == 12
    assert [victim.key for victim in shares.take(1, most=9)] == ["two"]
    shares.drop("one")
    shares.drop("never there")
    assert (len(shares), shares.bytes_of("t"), shares.take(1, most=9)) == (0, 0, [])


def test_no_more_are_taken_than_asked_for() -> None:
    shares = StoreShares()
    for i in range(9):
        shares.keep(str(i), "t", 1)
    assert len(shares.take(9, most=2)) == 2


@given(
    st.lists(st.tuples(st.integers(0, 5), st.integers(1, 50)), max_size=60),
    st.integers(0, 400),
)
def test_a_tenant_within_its_equal_part_loses_nothing(stored: list[tuple[int, int]], limit: int) -> None:
    shares = StoreShares()
    sizes: dict[str, int] = {}
    for number, (tenant, size) in enumerate(stored):
        shares.keep(str(number), str(tenant), size)
        sizes[str(tenant)] = sizes.get(str(tenant), 0) + size
    largest = max((size for _, size in stored), default=0)
    total = sum(sizes.values())
    taken = shares.take(total - limit, most=1000)
    assert total - sum(victim.size for victim in taken) <= max(limit, 0)
    for tenant, size in sizes.items():
        if size <= limit / len(sizes):
            assert shares.bytes_of(tenant) == size
    left = [shares.bytes_of(tenant) for tenant in sizes]
    losers = {victim.tenant for victim in taken}
    if losers:  # each of them has about as much as the largest that is left
        assert min(shares.bytes_of(tenant) for tenant in losers) >= max(left) - largest


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
