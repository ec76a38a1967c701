"""The durations of the job protocol."""

from __future__ import annotations

import pytest

from headrace.broker.settings import CLUSTER_LEASE_S, Timing

ELECTION_MOST_S = 9.0  # of nats-server: minElectionTimeout 4 s, maxElectionTimeout 9 s
RENEWAL_S = 4.0 / 3


@pytest.mark.parametrize("copies", [0, 1])
def test_without_a_cluster_leases_end_as_soon_as_ever(copies: int) -> None:
    assert Timing().at_copies(copies) == Timing()


@pytest.mark.parametrize("copies", [3, 5])
def test_leases_with_copies_outlast_an_election_and_a_member_without_renewals_is_missed_as_soon_as_without(copies: int) -> None:
    timing = Timing().at_copies(copies)
    assert timing.lease_ttl_s == CLUSTER_LEASE_S > ELECTION_MOST_S + RENEWAL_S
    assert timing.overdue_s == Timing().lease_ttl_s
    assert timing.ack_wait_s == Timing().ack_wait_s
