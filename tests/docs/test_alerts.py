"""The rules in deploy/prometheus ask for what there is, and each alert is tested both ways by promtool."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest
import yaml

from tests.docs.blocks import ROOT
from tests.docs.promql import FOLDER, faults, rules
from tests.support.prometheus_programs import program

ALERTS = rules("alerts.yaml")
RECORDED = rules("recording_rules.yaml")
PROMTOOL = program("promtool")
promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not here: `make monitors` unpacks it")


def cases_by_alert() -> dict[str, list[bool]]:
    """Per alert, for each of its tests, whether it is to fire."""
    found: dict[str, list[bool]] = {}
    document: Any = yaml.safe_load((FOLDER / "alerts_test.yaml").read_text())
    for test in document["tests"]:
        for expected in test["alert_rule_test"]:
            found.setdefault(expected["alertname"], []).append(bool(expected["exp_alerts"]))
    return found


def test_every_rule_asks_for_what_there_is() -> None:
    queries = [rule["expr"] for rule in (*ALERTS, *RECORDED)]
    assert len(queries) > 25
    assert {query: faults(query) for query in queries if faults(query)} == {}


def test_every_alert_has_a_test_that_fires_and_one_that_does_not() -> None:
    assert {name: sorted(set(fires)) for name, fires in cases_by_alert().items()} == {
        rule["alert"]: [False, True] for rule in ALERTS
    }


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for rule in ALERTS:
        assert rule["labels"]["severity"] in ("warning", "critical"), rule["alert"]
        assert set(rule["annotations"]) == {"summary", "action"}, rule["alert"]
        assert rule["annotations"]["action"].endswith("."), rule["alert"]


def test_every_alert_is_on_the_page() -> None:
    page = (ROOT / "docs" / "observability.md").read_text()
    assert [rule["alert"] for rule in ALERTS if f"`{rule['alert']}`" not in page] == []


@promtool
@pytest.mark.slow
def test_promtool_accepts_the_rules_and_their_tests_pass() -> None:
    assert PROMTOOL is not None
    for arguments in (
        ["check", "rules", "recording_rules.yaml", "alerts.yaml"],
        ["check", "config", "prometheus.yml"],
        ["test", "rules", "alerts_test.yaml"],
    ):
        done = subprocess.run([PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
