"""The dashboards in deploy/grafana are made by their description, and ask for what there is."""

from __future__ import annotations

import itertools
import json
import re
from typing import Any

import pytest

from deploy.grafana.pages import DASHBOARDS
from deploy.grafana.panels import Dashboard, dashboard_json
from deploy.grafana.write import FOLDER, files
from tests.docs.blocks import ROOT
from tests.docs.promql import faults, known

PAGE = (ROOT / "docs" / "observability.md").read_text()
pages = pytest.mark.parametrize("page", DASHBOARDS, ids=lambda page: page.uid)


def test_the_files_are_up_to_date() -> None:
    wanted = files()
    assert {path: path.read_text() for path in sorted(FOLDER.glob("*.json"))} == wanted, "python -m deploy.grafana.write"


@pages
def test_every_query_asks_for_what_there_is(page: Dashboard) -> None:
    queries = [query.expr for panel in page.panels for query in panel.queries]
    assert {query: faults(query) for query in queries if faults(query)} == {}


@pages
def test_every_variable_takes_its_values_from_a_metric_that_has_the_label(page: Dashboard) -> None:
    series = known()
    assert [name for name, metric in page.variables.items() if name not in series[metric]] == []
    used = set(re.findall(r"\$(?!__)(\w+)", " ".join(query.expr for panel in page.panels for query in panel.queries)))
    assert used == set(page.variables)


@pages
def test_panels_do_not_overlap(page: Dashboard) -> None:
    places = [panel["gridPos"] for panel in dashboard_json(page)["panels"]]

    def apart(one: dict[str, int], other: dict[str, int]) -> bool:
        return (
            one["x"] + one["w"] <= other["x"]
            or other["x"] + other["w"] <= one["x"]
            or one["y"] + one["h"] <= other["y"]
            or other["y"] + other["h"] <= one["y"]
        )

    assert all(apart(one, other) for one, other in itertools.combinations(places, 2))
    assert all(place["x"] + place["w"] <= 24 for place in places)


@pages
def test_latencies_are_shown_as_quantiles_of_rates(page: Dashboard) -> None:
    """Not as means, and not as quantiles of all time."""
    queries = [query.expr for panel in page.panels for query in panel.queries]
    assert not [query for query in queries if "_sum" in query or "avg(" in query]
    assert all("rate(" in query for query in queries if "histogram_quantile" in query)


def test_every_dashboard_is_on_the_page() -> None:
    assert [page.uid for page in DASHBOARDS if f"`{page.uid}.json`" not in PAGE] == []


def test_a_dashboard_is_what_grafana_imports() -> None:
    page: Any = json.loads(next(iter(files().values())))
    assert page["schemaVersion"] >= 39
    assert page["templating"]["list"][0]["type"] == "datasource"
    assert {target["datasource"]["uid"] for panel in page["panels"] for target in panel["targets"]} == {"${datasource}"}


@pytest.mark.parametrize(
    ("query", "found"),
    [
        ("sum(rate(headrace_worker_nothing_total[1m]))", ["no metric headrace_worker_nothing_total"]),
        ("sum by (pool) (headrace_worker_runs)", ["no label pool of headrace_worker_runs"]),
        ('headrace_worker_runs{rank="0"}', ["no label rank of headrace_worker_runs"]),
        ("sum by (pool) (headrace_router_window) > 1 or vector(0)", []),
    ],
)
def test_a_query_for_what_is_not_there_is_found(query: str, found: list[str]) -> None:
    assert faults(query) == found


def test_a_query_that_is_no_promql_is_refused() -> None:
    with pytest.raises(ValueError, match="parenthesis"):
        faults("sum(rate(headrace_worker_runs[1m])")
