import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.lease import LeaseClock


def test_a_lease_counts_from_the_moment_its_write_was_sent() -> None:
    clock = LeaseClock(4.0)
    assert clock.confirmed(sent_at=10.0, now=11.5) == "gained"
    assert clock.held(13.9)
    assert not clock.held(14.0)


def test_a_confirmation_that_comes_after_the_lease_ran_out_does_not_revive_it() -> None:
    clock = LeaseClock(4.0)
    clock.confirmed(10.0, 10.0)
    assert clock.confirmed(sent_at=13.0, now=14.1) == "lapsed"
    assert not clock.held(14.1)
    assert clock.confirmed(14.1, 14.2) == "gained"


def test_a_write_that_took_longer_than_the_lease_lasts_gains_nothing() -> None:
    clock = LeaseClock(1.0)
    assert clock.confirmed(sent_at=0.0, now=1.0) == "late"
    assert not clock.held(1.0)


def test_a_lapse_is_reported_once() -> None:
    clock = LeaseClock(1.0)
    clock.confirmed(0.0, 0.0)
    assert not clock.lapsed(0.9)
    assert clock.lapsed(1.0)
    assert not clock.lapsed(1.0)


def test_a_lost_lease_was_held_once() -> None:
    clock = LeaseClock(1.0)
    assert not clock.lost()
    clock.confirmed(0.0, 0.0)
    assert clock.lost()
    assert not clock.lost()
    assert not clock.held(0.1)


def test_renewals_are_due_three_times_in_a_lease_and_sooner_after_a_failure() -> None:
    clock = LeaseClock(3.0)
    assert clock.next_action() == 0.0
    clock.confirmed(0.0, 0.1)
    assert clock.next_action() == pytest.approx(1.0)
    clock.failed(1.2)
    assert 1.2 < clock.next_action() < 1.5


def test_a_long_lease_is_renewed_as_often_as_a_short_one_so_that_most_of_it_is_left_when_an_election_begins() -> None:
    clock = LeaseClock(12.0)
    clock.confirmed(0.0, 0.1)
    assert clock.next_action() == pytest.approx(4.0 / 3)
    clock.failed(1.5)
    assert clock.next_action() == pytest.approx(1.75)
    assert clock.held(11.9)


@pytest.mark.parametrize("ttl_s", [0.0, -1.0, float("nan")])
def test_a_lease_needs_a_positive_ttl(ttl_s: float) -> None:
    with pytest.raises(ValueError, match="TTL"):
        LeaseClock(ttl_s)


# Steps of a holder: time passes, a write is sent and takes some time, or is not answered at all.
steps = st.lists(
    st.tuples(st.floats(min_value=0.0, max_value=2.0), st.floats(min_value=0.0, max_value=3.0), st.booleans()), max_size=30
)


@given(steps)
def test_a_lease_is_never_believed_in_longer_than_the_server_keeps_it(script: list[tuple[float, float, bool]]) -> None:
    """The server keeps the key for TTL from when the write arrives, which is not before it was sent."""
    ttl_s = 2.0
    clock = LeaseClock(ttl_s)
    now = 0.0
    kept_until = 0.0
    lapses = gains = 0
    for pause_s, trip_s, answered in script:
        now += pause_s
        lapses += clock.lapsed(now)
        if not answered:
            clock.failed(now)
            continue
        sent_at = now
        kept_until = max(kept_until, sent_at + ttl_s)
        now += trip_s
        outcome = clock.confirmed(sent_at, now)
        gains += outcome == "gained"
        lapses += outcome == "lapsed"
        assert not clock.held(now) or now < kept_until
        assert clock.expires is None or clock.expires <= kept_until
    assert lapses in (gains, gains - 1)
