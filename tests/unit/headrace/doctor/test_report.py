"""How `headrace doctor` prints what it found."""

from __future__ import annotations

import json

from headrace.doctor.findings import error, ok
from headrace.doctor.report import as_json, as_text

FOUND = [ok("a", "all well"), error("b", "broken", "mend it")]


def test_a_remedy_stands_below_its_finding_and_the_last_line_counts() -> None:
    assert as_text(FOUND, colour=False).splitlines() == [
        "ok     all well",
        "ERROR  broken",
        "       → mend it",
        "",
        "1 fine, 1 to mend",
    ]


def test_colour_changes_no_column() -> None:
    plain, coloured = as_text(FOUND, colour=False), as_text(FOUND, colour=True)
    assert "\x1b[31mERROR\x1b[0m  broken" in coloured
    assert "\x1b" not in plain


def test_programs_get_every_field() -> None:
    assert json.loads(as_json(FOUND))[1] == {"check": "b", "level": "error", "text": "broken", "remedy": "mend it"}
