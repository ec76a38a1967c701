from __future__ import annotations

from headrace.planner.observation import RequestSight
from headrace.planner.recent_requests import FIRST_OUTPUT, RecentRequests
from tests.support.planner_sights import BEGAN, seen


def test_no_request_has_no_shape() -> None:
    assert RecentRequests().shape is None


def test_the_shape_has_means_and_a_long_request() -> None:
    recent = RecentRequests()
    placed = tuple(RequestSight(prompt=100 * i, uncached=50 * i) for i in range(1, 21))
    recent.note(seen(0, placed=placed))
    shape = recent.shape
    assert shape is not None
    assert (shape.prompt, shape.uncached, shape.long, shape.output) == (1050, 525, 950, FIRST_OUTPUT)
    recent.note(seen(1, outputs=(10, 30)))
    assert recent.shape is not None
    assert recent.shape.output == 20


def test_waits_are_a_quantile_and_nothing_of_too_few() -> None:
    recent = RecentRequests()
    recent.note(seen(0, placed=tuple(RequestSight(prompt=1, uncached=1, waited_s=float(i)) for i in range(20))))
    assert recent.wait_s(0.95, since_s=BEGAN) == 19.0
    assert recent.wait_s(0.95, since_s=BEGAN + 1) is None


def test_lengths_that_cannot_be_are_ignored() -> None:
    recent = RecentRequests()
    recent.note(seen(0, placed=(RequestSight(prompt=-1, uncached=0), RequestSight(prompt=5, uncached=9)), outputs=(-4,)))
    assert recent.shape is not None
    assert (recent.shape.prompt, recent.shape.uncached, recent.shape.output) == (5, 5, FIRST_OUTPUT)


def test_lengths_are_stored_and_taken_over() -> None:
    recent, again = RecentRequests(), RecentRequests()
    recent.note(seen(0, placed=(RequestSight(prompt=7, uncached=3),), outputs=(4,)))
    again.load(**recent.dump())  # type: ignore[arg-type]
    assert again.shape == recent.shape
