"""Settings of the planner that are read before it starts."""

from __future__ import annotations

import pytest

from headrace.config.planner_settings import PlannerSettings, fleet_times, for_fleet


def test_a_fleet_that_is_there_for_another_target_is_planned_for_that_one() -> None:
    settings = PlannerSettings(ttft_s=2.0, fleet_ttft="dear=0.3, cheap=5")
    assert [for_fleet(settings, fleet).ttft_s for fleet in ("dear", "cheap", "other", "")] == [0.3, 5.0, 2.0, 2.0]
    assert for_fleet(settings, "dear").miss == settings.miss


@pytest.mark.parametrize("chosen", ["dear", "=1", "dear=", "dear=soon", "dear=0", "dear=-1", "dear=inf", "dear=nan", "a=1,a=2"])
def test_what_is_no_time_of_a_fleet_is_refused_with_its_name(chosen: str) -> None:
    with pytest.raises(ValueError, match="fleet_ttft"):
        PlannerSettings(fleet_ttft=chosen)


def test_nothing_is_named_by_default() -> None:
    assert fleet_times("") == {}
