"""What the exit code of `headrace doctor` says."""

from __future__ import annotations

import pytest

from headrace.doctor.findings import SERVER_UNREACHABLE, Finding, error, exit_code, ok, unknown, warning

WARNING = warning("a.b", "odd", "look")
ERROR = error("a.b", "broken", "mend")


@pytest.mark.parametrize(
    ("findings", "code", "strict_code"),
    [
        ([], 0, 0),
        ([ok("a.b", "fine"), unknown("a.c", "not seen")], 0, 0),
        ([WARNING], 0, 1),
        ([WARNING, ERROR], 1, 1),
        ([ERROR, error(SERVER_UNREACHABLE, "gone", "start")], 69, 69),
    ],
)
def test_scripts_can_tell_what_has_to_be_mended(findings: list[Finding], code: int, strict_code: int) -> None:
    assert exit_code(findings) == code
    assert exit_code(findings, strict=True) == strict_code
