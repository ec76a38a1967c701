"""Formats the findings of `headrace doctor` for a terminal and for programs."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from headrace.doctor.findings import LEVELS, Finding, Level

_MARKS: dict[Level, tuple[str, str]] = {  # mark, and the colour of a terminal
    "ok": ("ok", "32"),
    "unknown": ("?", "36"),
    "warning": ("warn", "33"),
    "error": ("ERROR", "31"),
}
_INDENT = " " * 7


def as_text(findings: Sequence[Finding], *, colour: bool) -> str:
    """Return a line per finding with its remedy below, and a line that counts them."""
    lines = []
    for finding in findings:
        mark, code = _MARKS[finding.level]
        shown = f"\x1b[{code}m{mark:<5}\x1b[0m" if colour else f"{mark:<5}"
        lines.append(f"{shown}  {finding.text}")
        if finding.remedy:
            lines.append(f"{_INDENT}→ {finding.remedy}")
    return "\n".join([*lines, "", _summary(findings)]) + "\n"


def as_json(findings: Sequence[Finding]) -> str:
    """Return the findings as a JSON list of objects with check, level, text and remedy."""
    return json.dumps([dataclasses.asdict(finding) for finding in findings], indent=1, ensure_ascii=False) + "\n"


def _summary(findings: Sequence[Finding]) -> str:
    counts = {level: sum(1 for f in findings if f.level == level) for level in LEVELS}
    words = {"ok": "fine", "unknown": "not seen", "warning": "to look at", "error": "to mend"}
    return ", ".join(f"{counts[level]} {words[level]}" for level in LEVELS if counts[level]) or "nothing was checked"
