"""Which raft groups are to elect now."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.elections.overdue import AGAIN_S, CALLS, SPLIT_AGAIN_S, Answers, Call, Overdue
from headrace.jetstream.elections.raft_groups import Member, RaftGroup

PEERS = {"id1": Member("n1"), "id2": Member("n2"), "id3": Member("n3")}


def group(state: str = "FOLLOWER", leader: str = "id1", term: int = 7, **fields: object) -> RaftGroup:
    return RaftGroup(state=state, leader=leader, term=term, quorum_needed=2, peers=PEERS, **fields)  # type: ignore[arg-type]


def answers(second: RaftGroup, third: RaftGroup | None = None) -> Answers:
    return {"n2": {"g": second}} | ({"n3": {"g": third}} if third is not None else {})


def test_a_group_whose_leader_is_gone_is_called_in_the_term_after_its_newest() -> None:
    assert Overdue().due(0.0, answers(group(), group(term=9)), {"n1"}) == [Call("g", 10)]


@pytest.mark.parametrize(
    ("second", "third", "gone"),
    [
        (group(), group(), set()),  # it lives
        (group(), group(), {"n3"}),  # another one is gone
        (group("LEADER", "id2"), group(), {"n1"}),  # elected; the third has not heard of it yet
        (group(), group(leader="id2"), {"n1"}),
        (group(), None, {"n1", "n3"}),  # one of three elects nobody
        (group(traffic_account="HR"), group(traffic_account="HR"), {"n1"}),  # no other account may send to it
    ],
)
def test_other_groups_are_left_alone(second: RaftGroup, third: RaftGroup | None, gone: set[str]) -> None:
    overdue = Overdue()
    for now in (0.0, 10.0, 20.0):
        assert overdue.due(now, answers(second, third), gone) == []


def test_messages_in_the_system_account_can_be_sent() -> None:
    own = group(traffic_account="SYS", system_account=True)
    assert Overdue().due(0.0, answers(own, own), {"n1"})


def test_a_group_that_somebody_else_has_called_gets_the_time_of_an_election() -> None:
    overdue, called = Overdue(), answers(group(leader=""), group(leader=""))
    assert overdue.due(0.0, called, {"n1"}) == []
    assert overdue.due(AGAIN_S - 0.01, called, {"n1"}) == []
    assert overdue.due(AGAIN_S, called, {"n1"}) == [Call("g", 8)]


@pytest.mark.parametrize(
    ("second", "third", "split"),
    [
        (group("CANDIDATE", "", voted_for="id2"), group("CANDIDATE", "", voted_for="id3"), True),
        (group("CANDIDATE", "", voted_for="id2"), group("FOLLOWER", "", voted_for="id2"), False),  # it has won
        (group("CANDIDATE", "", voted_for="id2"), group("FOLLOWER", ""), False),  # this one is about to vote
        (group("CANDIDATE", "", term=8, voted_for="id2"), group("CANDIDATE", "", voted_for="id3"), False),
    ],
)
def test_candidates_that_have_voted_for_themselves_are_called_again_at_once(
    second: RaftGroup, third: RaftGroup, split: bool
) -> None:
    overdue = Overdue()
    assert overdue.due(0.0, answers(group(), group()), {"n1"})
    assert not overdue.due(SPLIT_AGAIN_S - 0.01, answers(second, third), {"n1"})
    assert bool(overdue.due(SPLIT_AGAIN_S, answers(second, third), {"n1"})) is split
    assert overdue.due(2 * AGAIN_S, answers(second, third), {"n1"})


def test_a_group_that_stays_without_a_leader_is_called_again_and_not_for_ever() -> None:
    overdue = Overdue()
    assert len(overdue.due(0.0, answers(group(), group()), {"n1"})) == 1
    collided = answers(group("CANDIDATE", ""), group("CANDIDATE", ""))
    called = [n for n in range(1, 100) if overdue.due(n * (AGAIN_S / 2 + 0.01), collided, {"n1"})]
    assert called == [2 * n for n in range(1, CALLS)]
    assert overdue.leaderless == 1


def test_a_group_that_had_a_leader_meanwhile_is_called_anew() -> None:
    overdue = Overdue()
    assert overdue.due(0.0, answers(group(), group()), {"n1"})
    assert not overdue.due(0.1, answers(group("LEADER", "id2"), group(leader="id2")), {"n1"})
    assert overdue.leaderless == 0
    assert overdue.due(0.2, {"n1": {"g": group(leader="id2")}, "n3": {"g": group(leader="id2")}}, {"n2"})


VIEWS = st.builds(group, st.sampled_from(["FOLLOWER", "CANDIDATE", "LEADER"]), st.sampled_from(["", "id1", "id2", "id3"]))


@given(st.lists(st.tuples(VIEWS, VIEWS, st.sets(st.sampled_from(["n1", "n2", "n3"]))), max_size=40))
def test_a_group_is_never_called_while_a_leader_answers_nor_twice_within_an_election(
    looks: list[tuple[RaftGroup, RaftGroup, set[str]]],
) -> None:
    overdue, last = Overdue(), -AGAIN_S
    for n, (second, third, gone) in enumerate(looks):
        now = n * 0.1
        lives = "LEADER" in (second.state, third.state)
        if lives:
            last = -AGAIN_S
        if overdue.due(now, answers(second, third), gone):
            assert not lives
            named = {PEERS[view.leader].name for view in (second, third) if view.leader}
            assert named <= gone
            if not (second.leader and third.leader):
                assert now - last >= AGAIN_S - 1e-9 or last < 0
            last = now
