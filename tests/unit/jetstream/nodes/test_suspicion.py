"""When a client checks the server of a cluster that it is connected to, and when it leaves it."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.nodes.suspicion import LOST_S, REST_MOST_S, SETTLE_S, SILENT_S, STILL_S, Suspicion, is_cut_off


def test_an_answer_in_time_is_no_reason_to_check() -> None:
    suspicion = Suspicion()
    assert not suspicion.due(10.0, silent_s=0.0)
    assert not suspicion.due(10.0, silent_s=SILENT_S - 0.01)
    assert suspicion.due(10.0, silent_s=SILENT_S)
    assert not suspicion.due(10.0, still_s=STILL_S - 0.01, lost_s=LOST_S - 0.01, silent_s=SILENT_S - 0.01)
    assert suspicion.due(10.0, still_s=STILL_S)
    assert suspicion.due(10.0, lost_s=LOST_S)


def test_a_client_that_has_moved_stays_for_a_while() -> None:
    suspicion = Suspicion()
    suspicion.moved(10.0)
    assert not suspicion.due(10.0 + SETTLE_S - 0.01, still_s=5.0)
    assert suspicion.due(10.0 + SETTLE_S, still_s=5.0)


def test_checks_that_find_nothing_become_rare_until_answers_come_again() -> None:
    suspicion = Suspicion()
    now, checks = 0.0, []
    while now < 60.0:  # an election that does not end
        if suspicion.due(now, silent_s=5.0):
            checks.append(now)
            suspicion.cleared(now, 1.0)
        now += 0.25
    assert checks[:4] == [0.0, 1.0, 3.0, 7.0]
    assert all(b - a <= REST_MOST_S for a, b in pairwise(checks))
    assert not suspicion.due(now + REST_MOST_S, silent_s=0.0)
    suspicion.cleared(now, 1.0)
    assert suspicion.due(now + 1.0, silent_s=5.0), "it was well in between"


@pytest.mark.parametrize(
    ("reached", "answers", "leaves"),
    [
        ({"b": False, "c": False}, True, True),  # the minority of three
        ({"b": True, "c": False}, True, False),  # the other one is cut off
        ({"b": True, "c": True}, True, False),  # an election
        ({"b": None, "c": None}, True, False),  # nobody to go to
        ({"b": None, "c": False}, True, False),  # one down, a line broken between the two others: no side is larger
        ({"b": False, "c": False}, False, True),  # it stands still
        ({"b": False, "c": None}, False, True),
        ({"b": None, "c": None}, False, False),
        ({"b": True, "c": False, "d": False, "e": False}, True, True),  # two of five
        ({"b": True, "c": True, "d": False, "e": False}, True, False),
    ],
)
def test_a_server_is_left_only_for_a_larger_side(reached: dict[str, bool | None], answers: bool, leaves: bool) -> None:
    assert is_cut_off(reached, answers=answers) is leaves


@given(
    st.dictionaries(st.sampled_from("bcdef"), st.sampled_from([True, False, None]), max_size=5),
    st.booleans(),
    st.data(),
)
def test_what_is_decided_early_is_what_is_decided_when_all_are_known(
    reached: dict[str, bool | None], answers: bool, data: st.DataObject
) -> None:
    known = data.draw(st.sets(st.sampled_from(sorted(reached)))) if reached else set()
    some = {name: reached[name] for name in known}
    early = is_cut_off(some, answers=answers, open_=len(reached) - len(some))
    assert early in (None, is_cut_off(reached, answers=answers))
    assert is_cut_off(reached, answers=answers) is not None
