"""Whose renewals are missing while those of others come, and when nothing can be said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.membership.renewals import GAP_S, Renewals

OVERDUE_S = 4.0


def renewed(renewals: Renewals, *keys: str, first_s: float, until_s: float, every_s: float = 1.0) -> None:
    at = first_s
    while at <= until_s:
        for n, key in enumerate(keys):
            renewals.note(key, round(10 * at) + n, at)
        at += every_s


def test_a_member_is_overdue_when_it_alone_renews_no_more() -> None:
    renewals = Renewals(OVERDUE_S)
    renewed(renewals, "w", "others", first_s=0.0, until_s=10.0)
    renewed(renewals, "others", first_s=11.0, until_s=20.0)
    assert not renewals.overdue("w", 13.9)
    assert renewals.overdue("w", 14.0) == 100, "the revision that may be deleted"
    assert not renewals.overdue("others", 20.5)


def test_in_an_election_nobody_is_overdue_nor_right_after_it() -> None:
    renewals = Renewals(OVERDUE_S)
    renewed(renewals, "w", "others", first_s=0.0, until_s=10.0)
    assert not any(renewals.overdue(key, at) for key in ("w", "others") for at in (14.0, 19.0, 30.0))
    renewed(renewals, "others", first_s=19.0, until_s=30.0)  # the leader is there again
    assert not renewals.overdue("w", 22.9), "it has as long as it would have had without the election"
    assert renewals.overdue("w", 23.1)


def test_a_member_that_renews_again_is_not_overdue_and_one_that_has_left_never_is() -> None:
    renewals = Renewals(OVERDUE_S)
    renewed(renewals, "w", "v", "others", first_s=0.0, until_s=10.0)
    renewals.forget("v")
    renewed(renewals, "others", first_s=11.0, until_s=15.0)
    assert renewals.overdue("w", 15.0)
    assert not renewals.overdue("v", 15.0)
    renewals.note("w", 999, 15.5)
    assert not renewals.overdue("w", 15.5)


def test_one_whose_own_connection_was_away_says_nothing_of_others_until_it_has_watched_again() -> None:
    renewals = Renewals(OVERDUE_S)
    renewed(renewals, "w", "others", first_s=0.0, until_s=10.0)
    renewed(renewals, "others", first_s=10.0 + GAP_S + 0.1, until_s=15.0)  # what it missed meanwhile, it does not know
    assert not renewals.overdue("w", 15.0)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.floats(0.0, 3.0)), max_size=60), st.floats(0.0, 10.0))
def test_nobody_is_overdue_sooner_than_said(steps: list[tuple[str, float]], after_s: float) -> None:
    renewals, now, last = Renewals(OVERDUE_S), 0.0, {}
    for n, (key, wait_s) in enumerate(steps, 1):
        now += wait_s
        renewals.note(key, n, now)
        last[key] = (now, n)
    now += after_s
    for key in "abcd":
        if revision := renewals.overdue(key, now):
            assert revision == last[key][1]
            assert now - last[key][0] >= OVERDUE_S
            assert now - max(at for at, _ in last.values()) <= GAP_S


@pytest.mark.parametrize("after_s", [1.0, 5.0, 100.0])
def test_where_leases_end_by_themselves_nobody_is_overdue(after_s: float) -> None:
    renewals = Renewals(0.0)
    renewed(renewals, "w", "others", first_s=0.0, until_s=10.0)
    renewed(renewals, "others", first_s=11.0, until_s=10.0 + after_s)
    assert not renewals.overdue("w", 10.0 + after_s)
