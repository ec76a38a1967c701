"""What the audit of locked packages says of pip-audit's report, and when it fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.package import audit
from deploy.package.audit import read

CLEAN = {"name": "msgspec", "version": "0.22.0", "vulns": []}
UNKNOWN = {"name": "mine", "skip_reason": "Dependency not found on PyPI and could not be audited: mine (1.0)"}
BAD = {"name": "jinja2", "version": "3.0", "vulns": [{"id": "CVE-1", "fix_versions": ["3.1.6"], "aliases": []}]}


def test_what_is_vulnerable_is_named_with_the_version_that_is_not() -> None:
    found = read({"dependencies": [CLEAN, UNKNOWN, BAD]})
    assert (found.asked, found.unknown, found.found) == (2, ("mine",), ("jinja2 3.0: CVE-1, mended in 3.1.6",))
    assert "1 vulnerabilities known\njinja2 3.0: CVE-1" in found.report()


def script(folder: Path, text: str) -> Path:
    """A program in the place of uv."""
    path = folder / "uv"
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(("dependency", "code"), [(CLEAN, 0), (UNKNOWN, 3), (BAD, 1)])
def test_an_audit_that_could_not_be_made_is_neither_passed_nor_a_finding(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dependency: dict[str, object], code: int
) -> None:
    uv = script(tmp_path, f"import json; print(json.dumps({{'dependencies': [{dependency!r}]}}))")
    monkeypatch.setattr(sys, "argv", ["audit", str(uv), "one", "other"])
    assert audit.main() == code


def test_each_lock_is_reported_and_a_finding_is_not_hidden_by_a_lock_that_was_not_audited(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = f"import json, sys; print(json.dumps({{'dependencies': [{BAD!r} if 'bad' in sys.argv[-1] else {UNKNOWN!r}]}}))"
    uv = script(tmp_path, text)
    monkeypatch.setattr(sys, "argv", ["audit", str(uv), "x/bad.txt", "x/other.txt"])
    assert audit.main() == audit.FOUND
    told = capsys.readouterr().out
    assert "bad.txt: 1 packages audited, 1 vulnerabilities known" in told
    assert "other.txt: NOT AUDITED" in told
