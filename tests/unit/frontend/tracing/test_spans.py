"""A story becomes the spans of queue, start, prefill and decode, of each attempt, inside the request's own time."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.messages import Story
from headrace.broker.messages.stories import StoryEvent
from headrace.frontend.tracing import names
from headrace.frontend.tracing.context import TraceContext
from headrace.frontend.tracing.spans import NS, SpanData, spans_of_story

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


def test_a_move_that_was_not_heard_ends_the_run_at_the_next_placement() -> None:
    made = spans(
        story(StoryEvent(1.0, "started", 1, "a"), StoryEvent(4.0, "placed", 2, "b"), StoryEvent(4.5, "started", 2, "b"))
    )
    assert times(made)[2][:3] == ("prefill", 1.0, 4.0)


def test_a_request_that_never_was_placed_waited_to_its_end() -> None:
    assert times(spans(story())) == [("queue", 0.0, 9.0, "frontend", "i")]


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
