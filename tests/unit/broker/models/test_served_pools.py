"""A pool counts as served for a while after its last worker has gone."""

from __future__ import annotations

from headrace.broker.models.served_pools import LATELY_S, ServedPools


class FakeMembers:
    def __init__(self, *serving: str) -> None:
        self.serving = set(serving)

    def serving_workers(self, pool: str) -> list[str]:
        return ["w"] if pool in self.serving else []


def test_a_pool_is_served_while_it_has_a_worker_and_a_while_after_the_last_one() -> None:
    members = FakeMembers("p")
    served = ServedPools(members)  # type: ignore[arg-type]  # a stand-in with the method that is called
    served.refresh(["p", "q"], 0.0)
    assert served.lately("p", 10_000.0)  # however long ago the leases last changed
    assert not served.lately("q", 0.0)
    members.serving.clear()
    served.refresh(["p", "q"], 10_000.0)
    assert served.lately("p", 10_000.0 + LATELY_S - 1)
    assert not served.lately("p", 10_000.0 + LATELY_S)
    served.refresh(["p", "q"], 20_000.0)
    members.serving.add("p")
    served.refresh(["p", "q"], 20_001.0)
    assert served.lately("p", 99_999.0)
