"""The state of a worker session: what it may take, and who hears of a change."""

from __future__ import annotations

from headrace.broker.messages.control import HistoryEntry
from headrace.broker.messages.members import WorkerMember
from headrace.broker.worker.state import PLACED_FORGOTTEN_S, WorkerState
from tests.unit.broker.protocol.test_protocol_runs import make


def state(**member: object) -> WorkerState:
    record = WorkerMember(worker="w", pool="p", model="m", slots=4, **member)  # type: ignore[arg-type]
    return WorkerState(record, slots=4, tombstone_s=60.0)


def test_runs_and_requests_on_their_way_take_slots() -> None:
    one = state()
    one.runs.add(make(1, choices=2))
    assert (one.free_slots, one.room) == (2, 2)
    one.placed("a", 1, 0.0)
    assert (one.free_slots, one.room) == (2, 1)
    one.arrived("a", 1)
    one.arrived("never placed", 1)
    assert one.room == 2


def test_a_placed_request_that_does_not_arrive_gives_its_slot_back() -> None:
    one = state()
    one.placed("a", 1, 0.0)
    one.placed("b", 1, 5.0)
    one.forget_placed(PLACED_FORGOTTEN_S + 1.0)
    assert one.room == 3


def test_a_worker_on_trial_has_room_for_suspects_only() -> None:
    one = state()
    one.runs.add(make(1, attempt=3, history=[HistoryEntry(1, "x", 15), HistoryEntry(2, "y", 20)]))
    assert (one.free_slots, one.open_slots, one.room) == (2, 0, 0)
    (suspect,) = one.runs.suspects
    one.runs.suspect(suspect, 1, 2)
    assert (one.free_slots, one.open_slots, one.room) == (0, 0, 0)
    one.runs.clear(suspect)
    assert (one.free_slots, one.open_slots, one.room) == (3, 4, 3)


def test_a_worker_that_drains_or_changes_its_role_takes_nothing() -> None:
    one = state()
    assert one.taking
    one.withdrawn = "role"
    assert not one.taking
    one.withdrawn = ""
    one.draining = True
    assert not one.taking


def test_an_adapter_is_usable_until_the_engine_lets_go_of_it() -> None:
    one = state(adapters=["a"])
    assert (one.usable(""), one.usable("a"), one.usable("b")) == (True, True, False)
    one.unloading.add("a")
    one.update_member(adapters=[])
    assert one.usable("a")
    one.unloading.discard("a")
    assert not one.usable("a")


def test_every_listener_hears_of_a_change_in_turn() -> None:
    one, heard = state(), []
    one.on_change(lambda: heard.append("first"))
    one.on_change(lambda: heard.append("second"))
    one.changed()
    assert heard == ["first", "second"]


def test_a_change_of_the_load_alone_asks_for_no_work() -> None:
    one, heard = state(), []
    one.on_change(lambda: heard.append("slots"))
    one.on_load_change(lambda: heard.append("load"))
    one.load_changed()
    assert heard == ["load"]
