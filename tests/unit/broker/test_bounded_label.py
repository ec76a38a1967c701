"""Values from outside cannot make more series than are allowed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.bounded_label import OTHER, BoundedLabel


@given(st.lists(st.text(max_size=3), max_size=60), st.integers(0, 8))
def test_the_first_values_keep_their_names_and_the_rest_share_one(values: list[str], most: int) -> None:
    label = BoundedLabel(most)
    first = list(dict.fromkeys(values))[:most]
    assert [label.of(value) for value in values] == [value if value in first else OTHER for value in values]
