"""The virtual world in which prefill and decode apart are compared with together."""

from __future__ import annotations

from benchmarks.disagg.load import Goal, Pool, measure, workload

GOAL = Goal(ttft_s=2.0, itl_s=0.025)


def test_prompts_computed_elsewhere_leave_the_steps_of_decode_workers_alone() -> None:
    requests = workload(rate=6.0, seconds=4.0, long_share=0.3, seed=3)
    apart = measure(requests, Pool(prefill=1, decode=1, step_tokens=2048), "always", GOAL, rate=6.0, tuning={})
    together = measure(requests, Pool(prefill=0, decode=2, step_tokens=2048), "never", GOAL, rate=6.0, tuning={})
    assert apart.remote == 1.0
    assert apart.itl_p99 < 0.02 < together.itl_p99
