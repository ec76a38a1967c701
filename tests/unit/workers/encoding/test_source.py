"""A store that fails is left alone for a while, longer each time."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.workers.encoding.source import Breaker, KeptEmbeddings


class Clock:
    def __init__(self) -> None:
        self.at = 100.0

    def __call__(self) -> float:
        return self.at


def test_the_pause_doubles_up_to_its_longest_and_ends_with_a_success() -> None:
    clock = Clock()
    breaker = Breaker(clock, first_s=1.0, longest_s=3.0)
    assert breaker.closed
    for pause_s in (1.0, 2.0, 3.0, 3.0):
        breaker.failed()
        clock.at += pause_s - 0.01
        assert not breaker.closed
        clock.at += 0.02
        assert breaker.closed
    breaker.failed()
    breaker.succeeded()
    assert breaker.closed
    breaker.failed()
    clock.at += 1.01
    assert breaker.closed


def test_failures_of_requests_that_ran_together_count_once() -> None:
    clock = Clock()
    breaker = Breaker(clock, first_s=1.0)
    for _ in range(8):
        breaker.failed()
    clock.at += 1.01
    assert breaker.closed


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
