"""What probes say of a server that answers, or does not, and of messages that arrive at another one, or do not."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.nodes.probes import MOST, Probes
from headrace.jetstream.nodes.suspicion import Suspicion

STEP_S = 0.2


def test_a_server_that_answers_no_ping_stands_still_for_as_long_as_the_first_one_waits() -> None:
    probes = Probes()
    for n in range(5):
        number = probes.send(n * STEP_S)
        if n < 2:
            probes.own_answered(number)
    assert probes.still_s(1.0) == pytest.approx(1.0 - 2 * STEP_S)
    assert probes.lost_s(1.0) == 0.0, "it has had no time to pass anything on"
    probes.own_answered(5)
    assert probes.still_s(1.0) == 0.0


def test_a_message_is_lost_that_both_servers_could_have_passed_on_and_did_not() -> None:
    probes = Probes()
    probes.other_changed()
    for n in range(3):
        probes.own_answered(probes.send(n * STEP_S))
    assert probes.lost_s(1.0) == 0.0, "the other server may stand still"
    probes.other_answered(2)
    assert probes.lost_s(1.0) == 1.0
    probes.arrived(1)
    assert probes.lost_s(1.0) == pytest.approx(1.0 - STEP_S)
    probes.arrived(2)
    assert probes.lost_s(1.0) == 0.0


def test_another_server_is_expected_to_get_only_what_is_sent_since() -> None:
    probes = Probes()
    for n in range(3):
        probes.own_answered(probes.send(n * STEP_S))
    probes.other_changed()
    number = probes.send(1.0)
    probes.own_answered(number)
    probes.other_answered(number)
    assert probes.lost_s(1.5) == 0.5
    probes.own_changed()
    assert probes.lost_s(9.0) == probes.still_s(9.0) == 0.0


@given(st.lists(st.sampled_from(["send", "own", "other", "arrived", "both"]), max_size=200))
def test_nothing_is_suspected_while_all_arrives_and_little_is_kept(events: list[str]) -> None:
    """Answers come late, but in order: what has not arrived is never older than what was sent last and is unanswered."""
    probes, now, sent = Probes(), 0.0, {0: 0.0}
    done = {"own": 0, "other": 0, "arrived": 0}
    for event in events:
        now += STEP_S
        if event == "send":
            sent.setdefault(probes.send(now), now)
        for kind in ("own", "other", "arrived") if event == "both" else (event,):
            if kind in done and done[kind] < max(sent):
                done[kind] = max(sent)
                {"own": probes.own_answered, "other": probes.other_answered, "arrived": probes.arrived}[kind](done[kind])
        assert len(probes._sent) <= MOST
        if done["own"] == max(sent):
            assert probes.still_s(now) == 0.0
        if done["arrived"] == max(sent):
            assert probes.lost_s(now) == 0.0
        first_lost = done["arrived"] + 1
        if first_lost in sent:
            assert probes.lost_s(now) <= now - sent[first_lost] + 1e-9


def test_a_server_that_is_slow_now_and_then_is_no_reason_to_look() -> None:
    """It stands still for three tenths of a second out of four, as a server does that is given too little of a processor."""
    probes, suspicion, waiting, due = Probes(), Suspicion(), [], []
    for tenth in range(300):
        waiting.append(probes.send(tenth / 10))
        if tenth % 4 == 0:
            for number in waiting:
                probes.own_answered(number)
                probes.other_answered(number)
                probes.arrived(number)
            waiting.clear()
        now = tenth / 10 + 0.09
        due.append(suspicion.due(now, still_s=probes.still_s(now), lost_s=probes.lost_s(now)))
    assert not any(due)
