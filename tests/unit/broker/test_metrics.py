"""What alerts watch is there at 0 before it happens: Prometheus sees no increase in a series that has just appeared."""

from __future__ import annotations

import re
import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from headrace.broker import metrics
from headrace.broker.metrics import OTHER, BoundedLabel
from tests.docs.blocks import ROOT

PACKAGES = ("broker", "router", "workers", "frontend")


def used(pattern: str) -> set[str]:
    files = [path for package in PACKAGES for path in (ROOT / package).rglob("*.py")]
    return {found for path in files for found in re.findall(pattern, path.read_text())}


def test_every_kind_and_role_that_the_code_counts_is_there_from_the_start() -> None:
    assert used(r'MALFORMED\.labels\("(\w+)"\)') == set(metrics.MALFORMED_KINDS)
    assert used(r'metrics\.LEASE_LAPSES\.labels\("(\w+)"\)') == set(metrics.LEASE_ROLES)
    assert used(r'(?:move|move_all|move_soon|hand_over)\([^)]*\breason="(\w+)"') <= set(metrics.MOVE_REASONS)


def test_a_new_process_shows_them_at_0() -> None:
    code = "import headrace.broker.metrics, prometheus_client; print(prometheus_client.generate_latest().decode())"
    shown = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout
    for reason in metrics.MOVE_REASONS:
        assert f'headrace_broker_moved_total{{reason="{reason}"}} 0.0' in shown
    assert 'headrace_broker_malformed_total{kind="frame"} 0.0' in shown
    assert 'headrace_broker_lease_lapses_total{role="worker"} 0.0' in shown


@given(st.lists(st.text(max_size=3), max_size=60), st.integers(0, 8))
def test_the_first_values_keep_their_names_and_the_rest_share_one(values: list[str], most: int) -> None:
    label = BoundedLabel(most)
    first = list(dict.fromkeys(values))[:most]
    assert [label.of(value) for value in values] == [value if value in first else OTHER for value in values]
