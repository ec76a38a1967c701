"""A plan finds lines by their places, and reads lines that lie near each other together."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.batches.validation import RANGE, LinePlan


def plan_of(lengths: list[int]) -> LinePlan:
    plan, offset = LinePlan(), 0
    for length in lengths:
        plan.add(offset, length, 1, 1)
        offset += length + 1
    plan.close("d", 0)
    return plan


@given(st.lists(st.integers(1, 700_000), min_size=1, max_size=20), st.data())
def test_ranges_hold_each_wanted_line_once_and_are_bounded(lengths: list[int], data: st.DataObject) -> None:
    plan = plan_of(lengths)
    wanted = data.draw(st.lists(st.integers(1, len(lengths)), unique=True))
    found = []
    for start, length, inside in plan.ranges(wanted):
        assert length <= max(RANGE, *(plan.place(n)[1] for n in inside))
        for number in inside:
            offset, size = plan.place(number)
            assert start <= offset
            assert offset + size <= start + length
            found.append(number)
    assert sorted(found) == sorted(wanted)
