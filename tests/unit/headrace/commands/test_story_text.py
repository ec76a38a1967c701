"""The story of a request as text: stages from events, drawn to scale, in words."""

from __future__ import annotations

import itertools
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages import Decided, Routed, Story, StoryEvent
from headrace.commands.story_text import BAR, Stage, placements_text, stages, story_text, timeline


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
