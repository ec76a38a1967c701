"""The attacks that docs/security.md speaks of have tests, and each remedy can be taken out."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from tests.attacks.attempt import Attempt
from tests.attacks.table import ALL
from tests.docs.blocks import ROOT

FINDINGS = [*(f"C{n}" for n in range(1, 4)), *(f"H{n}" for n in range(1, 9)), *(f"M{n}" for n in range(1, 10))]
FINDINGS += [f"L{n}" for n in range(1, 8)]


@cache
def functions(file: Path) -> frozenset[str]:
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    return frozenset(node.name for node in ast.walk(ast.parse(file.read_text())) if isinstance(node, kinds))


def test_every_finding_of_the_audit_was_tried() -> None:
    assert set(FINDINGS) <= {attempt.finding for attempt in ALL}


@pytest.mark.parametrize("attempt", ALL, ids=lambda attempt: f"{attempt.finding}: {attempt.tries}")
def test_an_attack_has_its_tests_and_a_remedy_that_can_be_taken_out(attempt: Attempt) -> None:
    for test in attempt.tests:
        file, _, name = test.partition("::")
        assert name in functions(ROOT / "tests" / file), test
    assert attempt.cuts
    for cut in attempt.cuts:
        assert (ROOT / cut.file).read_text().count(cut.old) == 1, f"{cut.file}: {cut.old}"
        assert cut.old != cut.new
