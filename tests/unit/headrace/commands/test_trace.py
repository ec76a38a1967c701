"""A router's decision, as people read it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from headrace.broker.messages.control import (
    Candidate,
    Decided,
    Explanation,
    FleetDecision,
    FleetOption,
    Routed,
    Story,
    StoryEvent,
)
from headrace.broker.messages.requests import PrefillDecision
from headrace.commands.trace import BAR, Stage, chronology, explained, placements_text, stages, story_text, timeline

TOLD = Explanation(id="r1", router="router-1", policy="kv", state="placed", worker="decode-1", reason="load")


@pytest.mark.parametrize(
    ("decision", "words"),
    [
        (PrefillDecision(remote=True, worker="prefill-2", reason="prefix"), "prompt computed by prefill-2, reason prefix"),
        (PrefillDecision(remote=True, reason="pays"), "prompt computed by any prefill worker, reason pays"),
        (PrefillDecision(reason="short"), "prompt computed by the worker that answers, reason short"),
        (PrefillDecision(), "prompt computed by the worker that answers"),
    ],
)
def test_where_the_prompt_is_computed_and_why(decision: PrefillDecision, words: str) -> None:
    told = Explanation(**{name: getattr(TOLD, name) for name in TOLD.__struct_fields__ if name != "prefill"}, prefill=decision)
    assert f"  {words}" in explained(told).splitlines()


def test_nothing_is_said_of_prefill_where_it_was_no_question() -> None:
    assert "prompt" not in explained(TOLD)


def test_the_chosen_worker_comes_first_and_is_marked() -> None:
    told = Explanation(
        id="r1",
        state="placed",
        worker="b",
        candidates=[Candidate(worker="a", cost_s=0.1, room=True), Candidate(worker="b", cost_s=0.2, room=True)],
    )
    rows = explained(told).splitlines()
    assert [row.split()[0] for row in rows[-2:]] == ["→", "a"]
    assert rows[-2].split()[1] == "b"


def test_a_request_that_moved_shows_every_placement_in_order_of_time() -> None:
    first = replace(TOLD, at=10.0)
    second = replace(TOLD, at=14.0, attempt=2, worker="decode-2", waited_s=0.002, since_arrival_s=4.1, predicted_ttft_s=4.11)
    third = replace(TOLD, at=15.0, attempt=3, worker="decode-3", router="router-2")
    shown = chronology([third, replace(second, earlier=[Decided(**{f: getattr(first, f) for f in Decided.__struct_fields__})])])
    assert [one.worker for one in shown] == ["decode-1", "decode-2", "decode-3"]
    head, _, times = explained(second).splitlines()[:3]
    assert head == "r1, attempt 2: placed on decode-2"
    assert "waited 0.002 s in the window, 4.100 s after the request arrived" in times
    assert "predicted first token 0.010 s after the placement" in times


def test_one_that_waits_has_no_prediction_and_the_client_s_id_is_shown() -> None:
    text = explained(replace(TOLD, state="waiting", worker="", name="mine-1"))
    assert "the client's id is mine-1" in text
    assert "predicted" not in text


def test_the_fleet_is_shown_with_the_predictions_of_the_others() -> None:
    options = [
        FleetOption(fleet="cheap", price=1.0, rank=1, state="late", ttft_s=2.0, itl_s=0.02, late_s=1.1),
        FleetOption(fleet="dear", price=4.0, rank=0, state="meets", ttft_s=0.3, itl_s=0.01),
        FleetOption(fleet="new", price=4.0, rank=2, state="unknown", ttft_s=-1.0, itl_s=-1.0, late_s=-1.0),
    ]
    fleet = FleetDecision(fleet="dear", reason="meets", ttft_target_s=1.0, itl_target_s=0.05, options=options)
    line = "fleet dear, reason meets; targets 1 s to the first token, 0.05 s between two; dear meets (0.300 s, 0.010 s); "
    assert line + "cheap late (2.000 s, 0.020 s); new unknown" in explained(replace(TOLD, fleet=fleet))


def story(*events: StoryEvent, **fields: Any) -> Story:
    values: dict[str, Any] = {
        "id": "r1",
        "ingress": "i-1",
        "pool": "m-1",
        "model": "m",
        "tenant": "_",
        "request_class": "std",
        "submitted": 1_700_000_000.0,
        "prompt_tokens": 20,
    }
    return Story(**(values | fields), events=list(events))


MOVED = story(
    StoryEvent(0.1, "placed", 1, "w-1", tokens=20, uncached=4, by="router-1"),
    StoryEvent(0.2, "started", 1, "w-1"),
    StoryEvent(0.3, "prefilled", 1, "w-1", uncached=4),
    StoryEvent(1.3, "moved", 2, "w-1"),
    StoryEvent(1.6, "started", 2, "w-2", rank=1),
    StoryEvent(1.8, "prefilled", 2, "w-2", uncached=20),
    ended_s=2.8,
    answer_tokens=40,
    max_tokens=64,
    finish=["stop"],
    name="mine",
)


def test_a_request_that_moved_has_each_stage_once_per_attempt() -> None:
    assert [(part.name, round(part.begin_s, 3), round(part.end_s, 3), part.worker) for part in stages(MOVED, 9.0)] == [
        ("queue", 0.0, 0.2, ""),
        ("prefill", 0.2, 0.3, "w-1"),
        ("decode", 0.3, 1.3, "w-1"),
        ("move", 1.3, 1.6, ""),
        ("prefill", 1.6, 1.8, "w-2"),
        ("decode", 1.8, 2.8, "w-2"),
    ]


def test_the_transfer_of_blocks_that_another_worker_computed_is_a_stage() -> None:
    apart = story(
        StoryEvent(0.2, "started", 1, "w-1"), StoryEvent(1.0, "prefilled", 1, "w-1", uncached=20, fetch_ms=300), ended_s=2.0
    )
    assert [(part.name, round(part.begin_s, 3), round(part.end_s, 3)) for part in stages(apart, 9.0)] == [
        ("queue", 0.0, 0.2),
        ("prefill", 0.2, 0.7),
        ("transfer", 0.7, 1.0),
        ("decode", 1.0, 2.0),
    ]
    assert "20 prompt tokens computed, blocks fetched in 300 ms" in story_text(apart, [], now_s=9.0)


def test_an_open_request_is_in_its_stage_until_now_and_late_events_of_older_attempts_change_nothing() -> None:
    late = story(
        StoryEvent(0.2, "started", 2, "w-2"), StoryEvent(0.3, "started", 1, "w-1"), StoryEvent(0.4, "prefilled", 1, "w-1")
    )
    assert stages(late, 5.0) == [Stage("queue", 0.0, 0.2), Stage("prefill", 0.2, 5.0, "w-2")]
    assert stages(story(), 5.0) == [Stage("queue", 0.0, 5.0)]


def test_stages_are_drawn_to_scale_and_none_is_lost() -> None:
    drawn = timeline(stages(MOVED, 9.0))
    assert len(drawn) == BAR
    assert [drawn[:1], drawn[-1:]] == [".", "#"]
    assert set(drawn) == set(".=#!")
    short = [Stage("queue", 0.0, 0.001), Stage("prefill", 0.001, 100.0)]
    assert timeline(short) == "." + "=" * (BAR - 1)
    assert timeline([Stage("queue", 0.0, 0.0)]) == ""


EVENTS = st.builds(
    StoryEvent,
    after_s=st.floats(0, 100),
    kind=st.sampled_from(["placed", "started", "prefilled", "settled", "moved"]),
    attempt=st.integers(1, 4),
    worker=st.sampled_from(["w-1", "w-2"]),
)


@given(st.lists(EVENTS, max_size=12), st.floats(0, 200))
def test_whatever_was_heard_the_stages_cover_the_life_of_the_request(events: list[StoryEvent], ended_s: float) -> None:
    told = story(*events, ended_s=ended_s)
    parts = stages(told, 0.0)
    assert parts[0].begin_s == 0.0
    assert all(one.end_s == other.begin_s for one, other in itertools.pairwise(parts))
    assert all(part.seconds >= 0 for part in parts)
    assert parts[-1].end_s >= ended_s
    assert len(timeline(parts)) <= BAR + len(parts)
    assert story_text(told, [], 0.0)


def test_the_text_says_what_happened_in_order() -> None:
    decided = Decided(id="r1", router="router-1", worker="w-1", state="placed", policy="kv")
    text = story_text(MOVED, [decided], 9.0)
    wanted = [
        "r1: answered (stop)",
        "the client's id is mine",
        "20 prompt tokens, 40 of at most 64 answer tokens",
        "+   0.000  submitted to frontend i-1",
        "+   0.100  placed on w-1 by router-1, 16 prompt tokens cached by prediction",
        "+   0.200  started on w-1",
        "+   0.300  first token on w-1, 4 prompt tokens computed",
        "+   1.300  moved on from w-1: attempt 2 is next",
        "+   1.600  started on w-2~1, attempt 2",
        "+   2.800  answered (stop)",
        ". queue 0.200 s, = prefill 0.300 s, # decode 2.000 s, ! move 0.300 s",
        "by router-1, policy kv",
    ]
    at = 0
    for words in wanted:
        assert words in text[at:], (words, text)
        at = text.index(words, at)


def test_a_placement_that_is_told_late_stands_before_the_start() -> None:
    text = story_text(story(StoryEvent(0.2, "started", 1, "w-1"), StoryEvent(0.3, "placed", 1, "w-1"), ended_s=1.0), [], 9.0)
    assert text.index("placed on w-1 by the worker itself") < text.index("started on w-1")


def test_an_error_is_told_with_its_words() -> None:
    text = story_text(story(ended_s=3.0, fault="deadline_exceeded", message="too late", lost_events=7), [], 9.0)
    assert "r1: ended as deadline_exceeded: too late" in text
    assert "and 7 events more" in text


def test_stored_placements_are_told_when_no_frontend_remembers() -> None:
    records = [
        Routed(at=2.0, id="r1", attempt=2, worker="w-2", tokens=20, uncached=20, reason="moved"),
        Routed(at=1.0, id="r1", worker="w-1", router="router-1", tokens=20, uncached=4, waited_s=0.25),
    ]
    first, second = placements_text("r1", records).splitlines()[1:]
    assert "attempt 1 on w-1 by router-1, 20 prompt tokens (16 cached by prediction), waited 0.250 s" in first
    assert "attempt 2 on w-2 by itself" in second
    assert second.endswith("reason moved")
