"""When a nats-server that stores nothing is started again, and when it is left alone."""

from __future__ import annotations

from itertools import pairwise

from headrace.up.stuck_store import AFTER_FULL_S, AGAIN_FIRST_S, AGAIN_MOST_S, ROOM_BYTES, UNEXPLAINED_S, StuckStore

FULL, ROOM = 0, 2 * ROOM_BYTES


def test_a_full_disk_is_waited_for_and_then_the_server_is_started_again_at_once() -> None:
    rule = StuckStore()
    assert not any(rule.restart_due(float(now), stuck=now > 8, free_bytes=FULL) for now in range(600))
    assert not rule.restart_due(600.0, stuck=True, free_bytes=ROOM_BYTES - 1)
    assert rule.restart_due(601.0, stuck=True, free_bytes=ROOM)
    assert rule.was_full


def test_room_before_anything_was_refused_makes_it_wait_a_little() -> None:
    rule = StuckStore()
    assert not rule.restart_due(0.0, stuck=False, free_bytes=FULL)
    assert not rule.restart_due(1.0, stuck=True, free_bytes=ROOM)
    assert not rule.restart_due(1.0 + AFTER_FULL_S - 0.1, stuck=True, free_bytes=ROOM)
    assert rule.restart_due(1.0 + AFTER_FULL_S, stuck=True, free_bytes=ROOM)


def test_a_disk_that_was_not_seen_full_takes_longer() -> None:
    rule = StuckStore()
    assert not rule.restart_due(0.0, stuck=True, free_bytes=ROOM)
    assert not rule.restart_due(UNEXPLAINED_S - 0.1, stuck=True, free_bytes=ROOM)
    assert rule.restart_due(UNEXPLAINED_S, stuck=True, free_bytes=ROOM)


def test_a_word_that_it_stores_begins_the_wait_again() -> None:
    rule = StuckStore()
    rule.restart_due(0.0, stuck=True, free_bytes=ROOM)
    rule.restart_due(10.0, stuck=False, free_bytes=ROOM)
    rule.restart_due(11.0, stuck=True, free_bytes=ROOM)
    assert not rule.restart_due(UNEXPLAINED_S + 1.0, stuck=True, free_bytes=ROOM)


def test_starts_that_do_not_help_become_rare() -> None:
    rule = StuckStore()
    at_s: list[float] = []
    for now in range(3000):
        if rule.restart_due(float(now), stuck=True, free_bytes=ROOM):
            rule.restarted(float(now))
            at_s.append(float(now))
    gaps = [later - earlier for earlier, later in pairwise(at_s)]
    assert gaps[:4] == [UNEXPLAINED_S + 1.0, UNEXPLAINED_S + 1.0, 4 * AGAIN_FIRST_S, 8 * AGAIN_FIRST_S]
    assert max(gaps) == AGAIN_MOST_S
