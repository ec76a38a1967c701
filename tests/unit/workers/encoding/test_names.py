from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.encoding.names import in_order, object_name

WORKERS = st.lists(st.text("abcdefgh", min_size=1, max_size=6), min_size=1, max_size=8, unique=True)


@given(st.lists(st.tuples(st.text(max_size=5), st.none() | st.text(max_size=5), st.text(max_size=5), st.binary(max_size=20))))
def test_a_name_is_that_of_one_item_of_one_encoder_and_one_salt(items: list[tuple[str, str | None, str, bytes]]) -> None:
    names = {item: object_name(*item) for item in items}
    assert len(set(names.values())) == len(names)
    assert all(object_name(*item) == name for item, name in names.items())


@given(st.text(), WORKERS, st.data())
def test_an_item_stays_with_its_encode_worker_whoever_else_comes_or_goes(
    name: str, workers: list[str], data: st.DataObject
) -> None:
    order = in_order(name, workers)
    assert sorted(order) == sorted(workers)
    left = data.draw(st.lists(st.sampled_from(workers), unique=True))
    assert in_order(name, left) == [worker for worker in order if worker in left]
    assert in_order(name, reversed(workers)) == order


def test_each_encode_worker_has_its_share_of_the_items() -> None:
    first = Counter(
        in_order(object_name("e", None, "image", bytes([n % 256, n // 256])), ["a", "b", "c"])[0] for n in range(600)
    )
    assert set(first) == {"a", "b", "c"}
    assert min(first.values()) > 120
