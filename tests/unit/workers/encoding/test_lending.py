"""Places of records in a ring of blocks."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.encoding.lending import Place, Shelf

BLOCKS, BYTES, REST_S = 8, 10, 5.0


def shelf(now_s: list[float]) -> Shelf:
    return Shelf(BLOCKS, BYTES, rest_s=REST_S, clock=lambda: now_s[0])


def test_a_record_lies_where_it_was_put_until_its_place_is_needed() -> None:
    now_s = [0.0]
    places = shelf(now_s)
    assert places.add("a", 31) == Place(0, 4, 31)
    assert places.add("b", 40) == Place(4, 4, 40)
    assert (places.find("a"), places.find("c")) == (Place(0, 4, 31), None)
    now_s[0] = REST_S
    assert places.add("c", 20) == Place(0, 2, 20)
    assert (places.find("a"), places.find("b")) == (None, Place(4, 4, 40))


def test_what_was_offered_a_moment_ago_is_not_overwritten() -> None:
    now_s = [0.0]
    places = shelf(now_s)
    places.add("a", 80)
    now_s[0] = REST_S - 0.1
    assert places.add("b", 1) is None
    assert places.find("a") is not None, "which offers it again"
    now_s[0] = REST_S + 0.1
    assert places.add("b", 1) is None
    now_s[0] = 2 * REST_S
    assert places.add("b", 1) == Place(0, 1, 1)


def test_a_record_larger_than_all_has_no_place_and_takes_none() -> None:
    now_s = [0.0]
    places = shelf(now_s)
    places.add("a", 10)
    now_s[0] = 100.0
    assert places.add("b", BLOCKS * BYTES + 1) is None
    assert places.find("a") is not None


@given(st.lists(st.tuples(st.integers(0, 6), st.integers(0, 95), st.floats(0.0, 4.0)), max_size=60))
def test_no_two_records_share_a_block_and_none_is_lost_before_its_rest(asked: list[tuple[int, int, float]]) -> None:
    now_s = [0.0]
    places = shelf(now_s)
    offered: dict[str, tuple[Place, float]] = {}
    for number, size, later_s in asked:
        now_s[0] += later_s
        name = f"r{number}"
        place = places.find(name) or places.add(name, size)
        for other, (known, at_s) in list(offered.items()):
            if place is not None and other != name and known.overlaps(place.first, place.count):
                assert now_s[0] - at_s >= REST_S
                del offered[other]
        if place is not None:
            assert place.first >= 0
            assert place.first + place.count <= BLOCKS
            assert place.count * BYTES >= place.size
            offered[name] = (place, now_s[0])
    assert len(places) == len(offered)
    assert all(places.find(name) == place for name, (place, _) in offered.items())
