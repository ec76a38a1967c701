"""The locks: what uv is asked for, and how their entries are read."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from deploy.package import locks
from deploy.package.locks import requirements, versions

DIGEST = f"--hash=sha256:{'0' * 64}"


def script(folder: Path, text: str) -> Path:
    """A program in the place of uv."""
    path = folder / "uv"
    path.write_text(f"#!{sys.executable}\n{text}\n")
    path.chmod(0o755)
    return path


def test_a_lock_is_written_without_the_markers_that_all_its_entries_have(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shuffled = " and ".join(sorted(locks.LINUX.split(" and ")))
    entries = f"a==1 ; {locks.LINUX} \\\n {DIGEST}\nb==2 ; python_full_version < '3.12' and {shuffled} \\\n {DIGEST}\n"
    uv = script(tmp_path, f"print({entries!r}, end='')")
    monkeypatch.setattr(locks, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["locks", str(uv), "nixl"])
    assert locks.main() == 0
    assert (tmp_path / "nixl.txt").read_text().splitlines()[1::2] == ["a==1 \\", "b==2 ; python_full_version < '3.12' \\"]
    assert requirements("nixl") == ["a==1", "b==2 ; python_full_version < '3.12'"]
    assert versions("nixl") == {"a": ["1"], "b": ["2"]}
