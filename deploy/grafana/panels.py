"""Describes dashboards in a few words each and turns them into Grafana's JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

SCHEMA = 39  # of Grafana 10 and later
WIDTH = 24  # of a dashboard, in Grafana's grid
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
QUANTILES = (0.5, 0.9, 0.99)

Unit = Literal["short", "reqps", "ops", "s", "bytes", "Bps", "percentunit"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Query:
    """A query in PromQL and the legend of its series."""

    expr: str
    legend: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Panel:
    """A graph or, if `stat`, one number. `limit` draws a line: values beyond it are bad, above or below."""

    title: str
    queries: Sequence[Query]
    unit: Unit = "short"
    about: str = ""
    stat: bool = False
    limit: float | None = None
    bad_below: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Dashboard:
    """A page of panels. `variables`: label → the metric whose values it takes."""

    uid: str
    title: str
    about: str
    variables: dict[str, str]
    panels: Sequence[Panel]


def rate(metric: str, *labels: str, where: str = "") -> Query:
    """Return the rate of a counter, summed over processes, by these labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return Query(expr=f"sum{by} (rate({metric}{where}[$__rate_interval]))", legend=_legend(labels))


def level(metric: str, *labels: str, where: str = "", how: str = "sum") -> Query:
    """Return the present value of a gauge, over processes, by these labels."""
    by = f" by ({', '.join(labels)})" if labels else ""
    return Query(expr=f"{how}{by} ({metric}{where})", legend=_legend(labels))


def quantiles(histogram: str, *labels: str, where: str = "", of: Sequence[float] = QUANTILES) -> list[Query]:
    """Return quantiles of a histogram over all processes, by these labels."""
    by = ", ".join(["le", *labels])
    return [
        Query(
            expr=f"histogram_quantile({q}, sum by ({by}) (rate({histogram}_bucket{where}[$__rate_interval])))",
            legend=" ".join([f"p{q * 100:g}", *(f"{{{{{label}}}}}" for label in labels)]),
        )
        for q in of
    ]


def _legend(labels: Sequence[str]) -> str:
    return " ".join(f"{{{{{label}}}}}" for label in labels)


def dashboard_json(page: Dashboard) -> dict[str, Any]:
    """Return a dashboard as Grafana imports it."""
    variables: list[dict[str, Any]] = [
        {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}
    ]
    variables += [_variable(name, metric) for name, metric in page.variables.items()]
    return {
        "uid": page.uid,
        "title": page.title,
        "description": page.about,
        "tags": ["headrace"],
        "schemaVersion": SCHEMA,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "templating": {"list": variables},
        "links": [{"type": "dashboards", "tags": ["headrace"], "title": "Headrace", "asDropdown": True, "includeVars": True}],
        "panels": _placed(page.panels),
    }


def _variable(name: str, metric: str) -> dict[str, Any]:
    query = f"label_values({metric}, {name})"
    return {
        "name": name,
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": query, "refId": name},
        "definition": query,
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "refresh": 2,
        "current": {"text": "All", "value": "$__all"},
    }


def _placed(panels: Sequence[Panel]) -> list[dict[str, Any]]:
    placed: list[dict[str, Any]] = []
    x = y = row = 0
    for number, panel in enumerate(panels, 1):
        width, height = (4, 4) if panel.stat else (8, 8)
        if x + width > WIDTH or (row and height != row):
            x, y = 0, y + row
        row = height
        placed.append(_panel(panel, number, {"x": x, "y": y, "w": width, "h": height}))
        x += width
    return placed


def _panel(panel: Panel, number: int, place: dict[str, int]) -> dict[str, Any]:
    defaults: dict[str, Any] = {"unit": panel.unit, "min": 0}
    if not panel.stat:
        defaults["custom"] = {"fillOpacity": 8, "lineWidth": 1}
    if panel.limit is not None:
        good, bad = ("red", "green") if panel.bad_below else ("green", "red")
        defaults["thresholds"] = {
            "mode": "absolute",
            "steps": [{"color": good, "value": None}, {"color": bad, "value": panel.limit}],
        }
        if not panel.stat:
            defaults["custom"]["thresholdsStyle"] = {"mode": "line"}
    options: dict[str, Any] = (
        {"reduceOptions": {"calcs": ["lastNotNull"]}, "colorMode": "value"}
        if panel.stat
        else {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi", "sort": "desc"}}
    )
    return {
        "id": number,
        "type": "stat" if panel.stat else "timeseries",
        "title": panel.title,
        "description": panel.about,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": options,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "expr": query.expr,
                "legendFormat": query.legend or panel.title,
                "range": True,
            }
            for index, query in enumerate(panel.queries)
        ],
    }
