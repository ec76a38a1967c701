from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.encoding.kept import KeptEmbeddings


@given(st.lists(st.tuples(st.sampled_from("abcdef"), st.integers(0, 60))))
def test_what_is_kept_is_bounded_and_counted(puts: list[tuple[str, int]]) -> None:
    kept = KeptEmbeddings(most_bytes=100)
    for name, size in puts:
        kept.put(name, bytes(size))
        assert kept.bytes <= 100
    assert kept.bytes == sum(len(data) for name in "abcdef" if (data := kept.get(name)) is not None)


def test_what_was_not_used_for_longest_makes_room() -> None:
    kept = KeptEmbeddings(most_bytes=2)
    kept.put("a", b"1")
    kept.put("b", b"2")
    assert kept.get("a") == b"1"
    kept.put("c", b"3")
    assert (kept.get("a"), kept.get("b"), kept.get("c")) == (b"1", None, b"3")


def test_what_is_larger_than_everything_drops_nothing() -> None:
    kept = KeptEmbeddings(most_bytes=2)
    kept.put("a", b"1")
    kept.put("b", b"222")
    assert (kept.get("a"), kept.get("b")) == (b"1", None)
