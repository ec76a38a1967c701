"""Trace contexts are read as the recommendation says, and what is not well-formed begins a new trace."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages.control import Story, StoryEvent
from headrace.frontend import spans as names
from headrace.frontend.spans import (
    MOST_STATE,
    NS,
    SpanData,
    TraceContext,
    new_context,
    new_span_id,
    read_context,
    spans_of_story,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
SPAN = "00f067aa0ba902b7"


def read(parent: str, *states: str) -> TraceContext | None:
    return read_context([(b"traceparent", parent.encode()), *((b"tracestate", state.encode()) for state in states)])


@given(st.integers(1, 2**128 - 1), st.integers(1, 2**64 - 1), st.booleans(), st.from_regex(r"\A(a=[a-z]{1,9}(,b=1)?)?\Z"))
def test_a_context_that_was_written_is_read_again(trace: int, span: int, sampled: bool, state: str) -> None:
    headers = TraceContext(trace, 1, sampled, state).headers(span)
    assert read_context([(name.encode(), value.encode()) for name, value in headers.items()]) == TraceContext(
        trace, span, sampled, state
    )


@pytest.mark.parametrize(
    "bad",
    [
        f"ff-{TRACE}-{SPAN}-01",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01-more",
        f"00-{TRACE}-{SPAN}",
        f" 00-{TRACE}-{SPAN}-01",
    ],
)
def test_a_context_that_is_not_well_formed_is_ignored(bad: str) -> None:
    assert read(bad) is None


def test_two_parents_are_none() -> None:
    parent = (b"traceparent", f"00-{TRACE}-{SPAN}-01".encode())
    assert read_context([parent, parent]) is None


def test_states_are_joined_and_one_that_is_too_long_is_dropped() -> None:
    parent = f"00-{TRACE}-{SPAN}-00"
    joined, dropped, unprintable = read(parent, "a=1", "b=2"), read(parent, "a=" + "x" * MOST_STATE), read(parent, "a=\x01")
    assert joined is not None
    assert dropped is not None
    assert unprintable is not None
    assert (joined.state, dropped.state, unprintable.state) == ("a=1,b=2", "", "")
    assert not joined.sampled


def test_none_all_and_about_a_share_of_new_traces_are_sampled() -> None:
    assert not any(new_context(0.0).sampled for _ in range(100))
    assert all(new_context(1.0).sampled for _ in range(100))
    assert 300 < sum(new_context(0.5).sampled for _ in range(1000)) < 700  # twelve standard deviations
    assert len({new_span_id() for _ in range(100)}) == 100


CONTEXT = TraceContext(7, 1, True)


def story(*events: StoryEvent, ended_s: float = 9.0) -> Story:
    return Story(
        id="r", ingress="i", pool="p", model="m", tenant="t", request_class="std", submitted=100.0, prompt_tokens=5,
        events=list(events), ended_s=ended_s,
    )  # fmt: skip


def spans(told: Story) -> list[SpanData]:
    return spans_of_story(told, CONTEXT, 5, "i")


def times(made: list[SpanData]) -> list[tuple[str, float, float, str, str]]:
    return [
        (span.name, span.begin_ns / NS - 100, span.end_ns / NS - 100, span.service.removeprefix("headrace-"), span.instance)
        for span in made
    ]


def test_a_request_by_way_of_a_router_has_four_spans_of_three_services() -> None:
    made = spans(
        story(
            StoryEvent(1.0, "placed", 1, "w", 5, 4, "rt", "pw", 1),
            StoryEvent(2.0, "started", 1, "w"),
            StoryEvent(4.0, "prefilled", 1, "w", 5, 3),
            StoryEvent(8.5, "settled", 1, "w", 40),
        )
    )
    assert times(made) == [
        ("queue", 0.0, 1.0, "router", "rt"),
        ("start", 1.0, 2.0, "worker", "w"),
        ("prefill", 2.0, 4.0, "worker", "w"),
        ("decode", 4.0, 9.0, "worker", "w"),
    ]
    assert {(span.trace, span.parent) for span in made} == {(7, 5)}
    assert made[0].attributes == {
        names.REQUEST_ID: "r",
        names.POOL: "p",
        names.ATTEMPT: 1,
        names.WORKER: "w",
        names.RANK: 1,
        names.ROUTER: "rt",
        names.UNCACHED_PREDICTED: 4,
        names.PREFILL_WORKER: "pw",
    }
    assert made[2].attributes[names.UNCACHED] == 3


def test_blocks_that_another_worker_computed_have_a_span_for_their_transfer() -> None:
    made = spans(
        story(
            StoryEvent(1.0, "placed", 1, "w", 5, 4, "rt", "pw"),
            StoryEvent(2.0, "started", 1, "w"),
            StoryEvent(4.0, "prefilled", 1, "w", 5, 3, fetch_ms=250),
        )
    )
    assert times(made)[2:] == [
        ("prefill", 2.0, 3.75, "worker", "w"),
        ("transfer", 3.75, 4.0, "worker", "w"),
        ("decode", 4.0, 9.0, "worker", "w"),
    ]


def test_a_resumed_request_links_its_second_run_to_the_first() -> None:
    made = spans(
        story(
            StoryEvent(1.0, "placed", 1, "a", by="rt"),
            StoryEvent(1.0, "started", 1, "a"),
            StoryEvent(2.0, "prefilled", 1, "a"),
            StoryEvent(3.0, "moved", 2, "a"),
            StoryEvent(4.0, "placed", 2, "b", by="rt"),
            StoryEvent(4.5, "started", 2, "b"),
            StoryEvent(5.0, "prefilled", 2, "b"),
        )
    )
    assert [(span.name, span.attributes[names.ATTEMPT]) for span in made] == [
        (name, attempt) for attempt in (1, 2) for name in ("queue", "start", "prefill", "decode")
    ]
    assert times(made)[3][1:3] == (2.0, 3.0)
    assert times(made)[4][1:3] == (3.0, 4.0)
    first_run = made[3].id
    assert [span.links for span in made] == [(), (), (), (), (), (), (first_run,), (first_run,)]


def test_what_is_heard_after_the_end_does_not_reach_beyond_it() -> None:
    made = spans(
        story(StoryEvent(9.2, "started", 1, "w"), StoryEvent(9.3, "placed", 1, "w"), StoryEvent(9.4, "prefilled", 1, "w"))
    )
    assert {span.end_ns / NS for span in made} == {109.0}


EVENTS = st.lists(
    st.builds(
        StoryEvent,
        st.floats(0, 12),
        st.sampled_from(["placed", "started", "prefilled", "settled", "moved"]),
        st.integers(1, 4),
        st.sampled_from(["a", "b"]),
        by=st.sampled_from(["", "rt"]),
    ),
    max_size=12,
)


@given(EVENTS)
def test_spans_of_any_events_lie_inside_the_request_and_link_to_earlier_ones(events: list[StoryEvent]) -> None:
    made = spans(story(*events))
    assert made
    assert len({span.id for span in made}) == len(made)
    seen: set[int] = set()
    for span in made:
        assert 100 * NS <= span.begin_ns <= span.end_ns <= 109 * NS
        assert set(span.links) <= seen
        seen.add(span.id)
    numbers = [int(str(span.attributes.get(names.ATTEMPT, 0))) for span in made]
    assert all(one <= other for one, other in pairwise(numbers))
