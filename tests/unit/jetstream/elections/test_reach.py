"""Which servers are cut off from most of the others."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.elections.reach import Reach

THREE = ("n1", "n2", "n3")


def heard(reach: Reach, now: float, *sides: tuple[str, ...]) -> None:
    """What was sent at each server arrived at all of its side."""
    for side in sides:
        for at in side:
            for sender in side:
                reach.arrived(at, sender, now)


def test_a_server_that_hears_only_itself_while_the_others_hear_each_other_is_cut_off() -> None:
    reach = Reach(3)
    heard(reach, 0.0, THREE)
    heard(reach, 0.5, ("n1",), ("n2", "n3"))
    assert reach.cut_off(0.9, 1.0) == set()
    heard(reach, 1.0, ("n1",), ("n2", "n3"))
    assert reach.cut_off(1.0, 1.0) == {"n1"}
    heard(reach, 1.5, THREE)
    assert reach.cut_off(1.5, 1.0) == set()


def test_nobody_is_cut_off_where_there_is_no_majority() -> None:
    reach = Reach(3)
    heard(reach, 0.0, THREE)
    heard(reach, 2.0, ("n1",), ("n2",), ("n3",))
    assert reach.cut_off(2.0, 1.0) == set()
    assert reach.cut_off(9.0, 1.0) == set(), "nothing arrives anywhere: this process stood still"


def test_a_server_that_has_just_come_is_not_cut_off_before_it_has_heard_of_the_others() -> None:
    reach = Reach(3)
    heard(reach, 0.0, THREE)
    reach.forget("n1")
    heard(reach, 2.0, ("n1",), ("n2", "n3"))
    assert reach.cut_off(2.0, 1.0) == set()


@given(st.lists(st.tuples(st.sampled_from(THREE), st.sampled_from(THREE), st.floats(0, 5)), max_size=60), st.floats(0, 6))
def test_most_servers_are_never_cut_off(arrivals: list[tuple[str, str, float]], now: float) -> None:
    reach = Reach(3)
    for at, sender, when in arrivals:
        reach.arrived(at, sender, when)
    assert len(reach.cut_off(now, 1.0)) < 3
