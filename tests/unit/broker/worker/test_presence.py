"""Whether a worker takes part, what it announces, and who hears of a change."""

from __future__ import annotations

from unittest.mock import MagicMock

from headrace.broker.messages.members import WorkerMember
from headrace.broker.worker.presence import Presence
from tests.unit.broker.worker.bench import Bench


async def test_a_worker_that_drains_or_changes_its_role_takes_nothing() -> None:
    presence = Bench().presence
    assert presence.taking
    presence.withdraw("role")
    assert not presence.taking
    presence.return_to_service()
    assert presence.taking
    presence.withdraw("sleep")
    presence.leave()
    presence.return_to_service()
    assert not presence.taking


async def test_an_adapter_is_usable_until_the_engine_lets_go_of_it() -> None:
    presence = Bench(adapters=["a"]).presence
    assert (presence.usable(""), presence.usable("a"), presence.usable("b")) == (True, True, False)
    presence.unloading.add("a")
    await presence.announce_adapters([])
    assert presence.usable("a")
    presence.unloading.discard("a")
    assert not presence.usable("a")


async def test_a_change_of_role_counts_from_its_announcement() -> None:
    bench = Bench()
    assert bench.presence.serves
    await bench.presence.announce(role="prefill")
    assert not bench.presence.serves
    assert [member.role for member in bench.world.announced] == ["prefill"]


async def test_every_listener_hears_of_a_change_in_turn() -> None:
    presence, heard = Bench().presence, []
    presence.on_change(lambda: heard.append("first"))
    presence.on_change(lambda: heard.append("second"))
    presence.changed()
    assert heard == ["first", "second"]


async def test_cache_events_stop_before_anything_is_asked_for_without_the_lease() -> None:
    bench, kv, order = Bench(), MagicMock(), []
    presence = Presence(bench.deps, WorkerMember(worker="w", pool="p", model="m", slots=4), kv)
    kv.lease_gained.side_effect = lambda: order.append("gained")
    kv.lease_lapsed.side_effect = lambda: order.append("lapsed")
    presence.on_lapse(lambda: order.append("runs"))
    presence.on_change(lambda: order.append("changed"))
    presence._lease_changed(True)
    presence._lease_changed(False)
    assert order == ["changed", "gained", "lapsed", "runs", "changed"]
