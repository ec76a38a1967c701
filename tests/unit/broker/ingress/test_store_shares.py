"""Shares of tenants: the largest makes room with its oldest, and who has no more than its part loses nothing."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.ingress.store_shares import StoreShares


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
