"""Counts follow from the results that were seen, however often they are looked at."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.batches.progress import LineProgress
from headrace.broker.batches.record import LineCounts
from headrace.broker.messages import JobResult, JobStatus, ResultTokens

STATUSES: list[JobStatus] = ["done", "failed", "cancelled", "expired", "poison", "malformed"]


@given(st.lists(st.tuples(st.integers(1, 9), st.sampled_from(STATUSES)), max_size=40))
def test_each_line_counts_once_by_its_first_result(looks: list[tuple[int, JobStatus]]) -> None:
    progress = LineProgress(9)
    progress.publish(range(1, 10))
    first: dict[int, JobStatus] = {}
    for number, status in looks:
        first.setdefault(number, status)
        progress.see(number, JobResult(id="x", status=status, tokens=ResultTokens(prompt=2, completion=1)))
    done = sorted(n for n, status in first.items() if status == "done")
    failed = sorted(n for n, status in first.items() if status != "done")
    assert progress.counts == LineCounts(total=9, completed=len(done), failed=len(failed))
    assert list(progress.of_kind("output")) == done
    assert list(progress.of_kind("error")) == failed
    assert sorted(progress.out) == progress.open(range(1, 10))
    assert progress.waiting == len(progress.out)
    assert progress.complete == (len(first) == 9)
    assert progress.tokens == ResultTokens(prompt=2 * len(first), completion=len(first))


def test_a_line_whose_result_was_seen_is_not_waited_for_again() -> None:
    progress = LineProgress(2)
    progress.see(1, JobResult(id="x", status="done"))
    progress.publish([1, 2])
    assert progress.out == [2]


def test_a_batch_without_lines_is_complete() -> None:
    assert LineProgress(0).complete
