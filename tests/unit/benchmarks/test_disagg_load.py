"""The virtual world in which prefill and decode apart are compared with together."""

from __future__ import annotations

import pytest

from benchmarks.disagg.load import Goal, Pool, measure, workload

GOAL = Goal(ttft_s=2.0, itl_s=0.025)


@pytest.mark.parametrize("prefill", [0, 1])
def test_everything_is_served_and_a_run_can_be_repeated_exactly(prefill: int) -> None:
    requests = workload(rate=4.0, seconds=3.0, long_share=0.3, seed=2)
    pool = Pool(prefill=prefill, decode=2 - prefill, step_tokens=256)
    first, second = (measure(requests, pool, "auto", GOAL, rate=4.0, tuning={}) for _ in range(2))
    assert first.ttft_p99 < 10
    assert first.shed == 0
    assert (first.good, first.ttft_p90, first.itl_p99, first.reasons) == (
        second.good,
        second.ttft_p90,
        second.itl_p99,
        second.reasons,
    )


def test_prompts_computed_elsewhere_leave_the_steps_of_decode_workers_alone() -> None:
    requests = workload(rate=6.0, seconds=4.0, long_share=0.3, seed=3)
    apart = measure(requests, Pool(prefill=1, decode=1, step_tokens=2048), "always", GOAL, rate=6.0, tuning={})
    together = measure(requests, Pool(prefill=0, decode=2, step_tokens=2048), "never", GOAL, rate=6.0, tuning={})
    assert apart.remote == 1.0
    assert apart.itl_p99 < 0.02 < together.itl_p99
