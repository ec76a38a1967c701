"""A plan finds lines by their places, and reads lines that lie near each other together."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.batches.validation import GAP, RANGE, LinePlan


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


def test_lines_far_apart_are_read_apart() -> None:
    plan = plan_of([10, GAP + 10, 10])
    assert [inside for _, _, inside in plan.ranges([1, 3])] == [[1], [3]]
    assert [inside for _, _, inside in plan.ranges([1, 2, 3])] == [[1, 2, 3]]


def test_a_line_costs_24_bytes() -> None:
    plan = plan_of([1] * 100)
    columns = (plan._offset, plan._length, plan._group, plan._whole, plan._order)
    assert sum(column.itemsize for column in columns) == 24
