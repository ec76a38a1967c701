"""What `headrace doctor` says of a machine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from headrace.doctor.facts import MachineFacts
from headrace.doctor.findings import Level
from headrace.doctor.machine_checks import check_machine

GIB = 1 << 30
GOOD = MachineFacts(
    data_dir="/data",
    data_free=50 * GIB,
    data_mode=0o700,
    open_files=65536,
    shared_memory=8 * GIB,
    nats_server="2.15.1",
    engines={"vllm": None},
)


def levels(facts: MachineFacts) -> dict[str, Level]:
    return {finding.check: finding.level for finding in check_machine(facts)}


def test_a_good_machine_has_nothing_to_look_at() -> None:
    assert set(levels(GOOD).values()) == {"ok"}


@pytest.mark.parametrize(
    ("facts", "check", "level"),
    [
        (replace(GOOD, data_free=GIB), "machine.disk", "warning"),
        (replace(GOOD, data_free=10 << 20), "machine.disk", "error"),
        (replace(GOOD, data_free=None), "machine.disk", "unknown"),
        (replace(GOOD, data_mode=0o755), "machine.data_folder", "warning"),
        (replace(GOOD, open_files=1024), "machine.open_files", "warning"),
        (replace(GOOD, open_files=256), "machine.open_files", "error"),
        (replace(GOOD, shared_memory=64 << 20), "machine.shared_memory", "warning"),
        (replace(GOOD, nats_server=None), "machine.nats_server", "warning"),
        (replace(GOOD, engines={"vllm": "no compiler"}), "machine.engine", "warning"),
        (replace(GOOD, engines={}), "machine.engine", "unknown"),
    ],
)
def test_each_fault_is_found_and_says_what_to_do(facts: MachineFacts, check: str, level: Level) -> None:
    (finding,) = [f for f in check_machine(facts) if f.level != "ok"]
    assert (finding.check, finding.level) == (check, level)
    assert finding.remedy or level == "unknown"
