from __future__ import annotations

from headrace.planner.replay.engines import STEP_TOKENS, Engine, Request
from headrace.planner.speed_curve import Speed

SPEED = Speed(base_s=0.01, prefill_s=1e-4, decode_s=0.0, context_s=0.0)


def run(engine: Engine, now_s: float = 0.0) -> float:
    while (end_s := engine.begin(now_s)) is not None:
        engine.finish()
        now_s = end_s
    return now_s


def test_a_request_has_its_first_token_after_its_prompt_and_ends_after_its_output() -> None:
    engine = Engine("w", SPEED, 8, 0.0, 0.0)
    request = Request(at=0.0, prompt=1000, uncached=1000, output=5)
    engine.take(request, 0.0)
    run(engine)
    assert request.first_s is not None
    assert request.end_s is not None
    assert abs(request.first_s - 0.11) < 1e-9
    assert abs(request.end_s - 0.15) < 1e-9
    assert request.met(ttft_s=0.2, itl_s=0.011)
    assert not request.met(ttft_s=0.1, itl_s=0.011)
    assert not request.met(ttft_s=0.2, itl_s=0.009)


def test_a_long_prompt_takes_several_steps_and_room_ends_at_a_step_of_waiting_prompt() -> None:
    engine = Engine("w", SPEED, 8, 0.0, 0.0)
    engine.take(Request(at=0.0, prompt=0, uncached=2 * STEP_TOKENS, output=1), 0.0)
    assert not engine.has_room(0.0)
    engine.begin(0.0)
    assert engine.finish() == []
    engine.begin(0.3)
    assert engine.held == 1  # in the step that runs
    assert len(engine.finish()) == 1
    assert engine.held == 0


def test_an_engine_that_starts_or_drains_takes_nothing() -> None:
    assert not Engine("w", SPEED, 8, 0.0, 60.0).has_room(59.0)
    assert Engine("w", SPEED, 8, 0.0, 60.0).has_room(60.0)
    assert not Engine("w", SPEED, 8, 0.0, 0.0, draining=True).has_room(1.0)
