"""Who looks after whom."""

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker.membership.failure_detector import WATCHED, watched

NAMES = st.sets(st.text("abcdefgh", min_size=1, max_size=3), min_size=1, max_size=12)


def test_each_looks_after_the_next_two_workers() -> None:
    workers = {"a", "c", "e"}
    assert watched("a", [], workers) == ["c", "e"]
    assert watched("e", [], workers) == ["a", "c"]
    assert watched("b", ["b", "d"], workers) == ["c", "e"]
    assert watched("a", [], {"a"}) == []


@given(NAMES, NAMES)
def test_every_worker_is_looked_after_by_two_of_the_others_if_there_are_two(workers: set[str], routers: set[str]) -> None:
    routers -= workers
    everybody = workers | routers
    by = {me: watched(me, sorted(routers), workers) for me in everybody}
    for me, names in by.items():
        assert me not in names
        assert set(names) <= workers
        assert len(names) == min(WATCHED, len(workers - {me}))
    for worker in workers:
        assert sum(worker in names for names in by.values()) >= min(WATCHED, len(workers) - 1)
        if len(everybody) > 1:
            assert any(worker in names for names in by.values()), (worker, by)
