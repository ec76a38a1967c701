"""The ranks of a worker are places of their own, with their part of its size and load."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.events import LoadReport, RankLoad
from headrace.broker.messages.members import WorkerMember
from headrace.broker.places import place_name, places_of, rank_of, ranks_of, reports_of, worker_of
from headrace.jetstream.errors import SubjectError
from headrace.jetstream.subjects import Subjects

MEMBER = WorkerMember(worker="w", pool="p", model="m", slots=9, blocks=101, epoch=7, kv_events=True)


@given(worker=st.from_regex(r"[A-Za-z0-9_-]{1,64}", fullmatch=True), rank=st.none() | st.integers(0, 999))
def test_a_place_names_its_worker_and_its_rank(worker: str, rank: int | None) -> None:
    place = place_name(worker, rank)
    assert (worker_of(place), rank_of(place)) == (worker, rank)
    assert Subjects().kv("p", place).rpartition(".")[2] == place


@pytest.mark.parametrize("place", ["w~", "w~x", "w~1~2", "w~1.2", "~1", "w~*"])
def test_what_names_no_place_is_no_subject(place: str) -> None:
    with pytest.raises(SubjectError):
        Subjects().kv("p", place)


def test_a_worker_with_one_rank_is_one_place_under_its_id() -> None:
    report = LoadReport(worker="w", epoch=7, n=1, at=0.0, slots=9, running=2, waiting=0)
    assert places_of({"w": MEMBER}) == {"w": MEMBER}
    assert reports_of(report) == [report]
    assert ranks_of(1) == [None]


def test_each_rank_has_its_part_of_the_slots_and_blocks() -> None:
    places = places_of({"w": WorkerMember(**(_fields(MEMBER) | {"ranks": 2})), "v": MEMBER})
    assert list(places) == ["w~0", "w~1", "v"]
    assert [(one.worker, one.slots, one.blocks, one.epoch) for one in places.values()][:2] == [
        ("w~0", 4, 50, 7),
        ("w~1", 4, 50, 7),
    ]
    tiny = WorkerMember(**(_fields(MEMBER) | {"ranks": 16, "slots": 4}))
    assert {one.slots for one in places_of({"w": tiny}).values()} == {1}


def test_each_rank_has_its_own_load_and_all_share_the_suspects() -> None:
    ranks = [RankLoad(running=3, blocks_total=50, queued_prefill_tokens=700), RankLoad(waiting=1, batch=1, yielding=1)]
    report = LoadReport(
        worker="w", epoch=7, n=1, at=0.0, slots=8, running=4, waiting=1, step_s=0.02, suspects=2, limit=4, ranks=ranks
    )
    first, second = reports_of(report)
    assert (first.worker, first.running, first.blocks_total, first.queued_prefill_tokens) == ("w~0", 3, 50, 700)
    assert (second.worker, second.running, second.waiting, second.batch, second.yielding) == ("w~1", 0, 1, 1, 1)
    assert {(one.slots, one.step_s, one.suspects, one.limit) for one in (first, second)} == {(4, 0.02, 2, 4)}


def test_no_rank_of_a_worker_on_trial_has_slots() -> None:
    report = LoadReport(worker="w", epoch=7, n=1, at=0.0, slots=0, running=0, waiting=0, ranks=[RankLoad(), RankLoad()])
    assert [one.slots for one in reports_of(report)] == [0, 0]


def _fields(member: WorkerMember) -> dict[str, object]:
    return {name: getattr(member, name) for name in member.__struct_fields__}
