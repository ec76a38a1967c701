from __future__ import annotations

from headrace.config.planner_settings import PlannerSettings
from headrace.planner.replay.counterfactual import play_fixed, play_planner
from headrace.planner.replay.engines import Request
from headrace.planner.replay.world import WorldSettings
from headrace.planner.speed_curve import Speed

SPEED = Speed(base_s=0.1, prefill_s=1e-3, decode_s=1e-3, context_s=0.0)
SETTINGS = PlannerSettings(ttft_s=5.0, itl_s=1.0, most=6, start_s=20.0)


def requests() -> list[Request]:
    return [Request(at=0.4 * i, prompt=600, uncached=600, output=10) for i in range(1500)]


def test_fixed_numbers_are_played_until_one_meets_the_targets() -> None:
    lines = play_fixed(requests(), SETTINGS, WorldSettings(speed=SPEED))
    assert [one.who for one in lines] == [f"always {n}" for n in range(1, len(lines) + 1)]
    assert lines[-1].attained >= 0.99
    assert all(one.attained < 0.99 for one in lines[:-1])
    assert lines[-1].worker_hours > lines[0].most * 600 / 3600


def test_the_planner_is_played_over_the_same_requests_and_each_play_begins_anew() -> None:
    some = requests()
    first, reasons = play_planner(some, SETTINGS, WorldSettings(speed=SPEED, start_s=20.0))
    again, _ = play_planner(some, SETTINGS, WorldSettings(speed=SPEED, start_s=20.0))
    assert first == again
    assert first.starts >= 1
    assert sum(reasons.values()) > 100
    assert all(one.end_s is None for one in some)
