from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from headrace.planner.capacity import (
    Shape,
    Targets,
    aggregated_capacity,
    decode_capacity,
    late_share,
    prefill_capacity,
    workers_for,
)
from headrace.planner.speed_curve import Speed

SPEED = Speed(base_s=0.01, prefill_s=1e-4, decode_s=1e-3, context_s=0.0)
SHAPE = Shape(prompt=1000, uncached=1000, output=100, long=2000)
TARGETS = Targets(ttft_s=2.0, itl_s=0.05)


def test_decode_is_bounded_by_the_time_between_tokens() -> None:
    found = decode_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=0)
    assert found.sequences == 40  # 10 ms and 1 ms for each
    assert abs(found.per_s - 40 / (100 * 0.05)) < 1e-9


def test_decode_is_bounded_by_slots_and_by_the_kv_cache() -> None:
    assert decode_capacity(SPEED, SHAPE, TARGETS, slots=8, kv_tokens=0).sequences == 8
    assert decode_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=5250).sequences == 5


def test_prompts_take_their_share_of_an_aggregated_worker() -> None:
    both = aggregated_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=0)
    assert both.per_s < decode_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=0).per_s
    assert both.per_s < 1 / 0.1


def test_longer_context_slows_decode() -> None:
    slow = Speed(base_s=0.01, prefill_s=1e-4, decode_s=1e-3, context_s=1e-6)
    assert (
        decode_capacity(slow, SHAPE, TARGETS, slots=0, kv_tokens=0).per_s
        < decode_capacity(SPEED, SHAPE, TARGETS, slots=0, kv_tokens=0).per_s
    )


def test_a_prompt_that_alone_is_later_than_the_target_makes_no_negative_target_and_no_unbounded_growth() -> None:
    long = Shape(prompt=60_000, uncached=60_000, output=10, long=90_000)
    for found in (
        prefill_capacity(SPEED, long, TARGETS),
        aggregated_capacity(SPEED, long, TARGETS, slots=64, kv_tokens=0),
    ):
        assert not found.reachable
        assert found.slack_s > 0
        assert workers_for(0.5 * found.per_s, found, TARGETS, most=1000) <= 8
        assert workers_for(10 * found.per_s, found, TARGETS, most=1000) <= 30


def test_a_step_that_alone_is_later_than_the_target_is_told() -> None:
    found = decode_capacity(Speed(base_s=0.2), SHAPE, TARGETS, slots=16, kv_tokens=0)
    assert not found.reachable
    assert found.per_s > 0


def test_no_requests_need_no_workers() -> None:
    found = prefill_capacity(SPEED, SHAPE, TARGETS)
    assert workers_for(0.0, found, TARGETS, most=5) == 0
    assert workers_for(float("nan"), found, TARGETS, most=5) == 0


speeds = st.builds(
    Speed,
    base_s=st.floats(1e-4, 0.5),
    prefill_s=st.floats(1e-6, 1e-2),
    decode_s=st.floats(1e-6, 1e-2),
    context_s=st.floats(0, 1e-6),
)
shapes = st.builds(
    Shape, prompt=st.floats(0, 1e5), uncached=st.floats(0, 1e5), output=st.floats(0, 1e4), long=st.floats(0, 2e5)
)
target = st.builds(Targets, ttft_s=st.floats(0.001, 60), itl_s=st.floats(0.001, 1), miss=st.floats(0.0001, 0.5))


@given(speeds, shapes, target, st.integers(0, 512), st.integers(0, 10**7), st.floats(0, 1e4))
def test_whatever_the_figures_more_load_never_needs_fewer_workers(
    speed: Speed, shape: Shape, targets: Targets, slots: int, kv: int, rate: float
) -> None:
    for found in (
        prefill_capacity(speed, shape, targets),
        decode_capacity(speed, shape, targets, slots=slots, kv_tokens=kv),
        aggregated_capacity(speed, shape, targets, slots=slots, kv_tokens=kv),
    ):
        assert found.per_s > 0
        assert found.sequences >= 1
        few = workers_for(rate, found, targets, most=50)
        assert 0 <= few <= workers_for(rate * 1.5, found, targets, most=50) <= 50


@given(st.integers(1, 30), st.floats(0.1, 100), shapes, target)
def test_more_workers_are_never_later(workers: int, rate: float, shape: Shape, targets: Targets) -> None:
    found = prefill_capacity(SPEED, shape, targets)
    assert 0 <= late_share(workers + 1, rate, found) <= late_share(workers, rate, found) + 1e-9 <= 1 + 1e-9
