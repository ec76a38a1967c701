"""A merge of modules is proved to have changed no code, and a change in it is found."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from deploy.dev.bodies import compare, main, read_renames

POOLS = '''
"""Pools."""

from __future__ import annotations

import structlog
from time import monotonic

log = structlog.get_logger()
_MOST = 3


def drain(name: str) -> float:
    """See `ITSELF`."""
    return monotonic() + _MOST
'''.replace("ITSELF", ".".join(("headrace", "router", "pools")))
SESSION = """
from typing import TYPE_CHECKING

import structlog
from headrace.router import pools
from headrace.router.pools import drain as emptied

if TYPE_CHECKING:
    from headrace.router.other import Other

log = structlog.get_logger()
_MOST = 4


class Session:
    most: Other = _MOST

    def end(self, name: str) -> float:
        from headrace.router import late

        late.note(pools.drain(name))
        return emptied(name)

    def shadowed(self, pools: Other) -> None:
        pools.drain(_MOST)
"""
LATE = "def note(what: float) -> None:\n    print(what)\n"
MERGED = '''
"""Sessions and their pools."""

import time

import structlog

log = structlog.get_logger()
_MOST = 3
_SESSION_MOST = 4


def drain(name: str) -> float:
    """See `headrace.router.session`."""
    return time.monotonic() + _MOST


class Session:
    """A session."""

    most: Other = _SESSION_MOST

    def end(self, name: str) -> float:
        note(drain(name))
        return drain(name)

    def shadowed(self, pools: Other) -> None:
        pools.drain(_SESSION_MOST)


def note(what: float) -> None:
    print(what)
'''
BEFORE = {"router/pools.py": POOLS, "router/session.py": SESSION, "router/late.py": LATE}
AFTER = {"router/session.py": MERGED}
RENAMES = read_renames(["> router/session.py", "rename router/session.py:_MOST=_SESSION_MOST"])


def test_a_merge_that_only_moves_code_is_equal() -> None:
    found, copies = compare(BEFORE, AFTER, RENAMES)
    assert found == []
    assert copies == ["log = structlog.get_logger(): 2 → 1"]


@pytest.mark.parametrize(
    ("old", "new", "name"),
    [
        ("return drain(name)", "return drain(name) + 1", "changed: Session"),
        ("note(drain(name))", "note(name)", "changed: Session"),
        ("pools.drain(_SESSION_MOST)", "drain(_SESSION_MOST)", "changed: Session"),
        ("time.monotonic()", "time.time()", "changed: drain"),
        ("_MOST = 3", "_MOST = 5", "gone: _MOST = 3 (router/pools.py)"),
        ("def note(what: float)", "def note(what: int)", "changed: note"),
        ("\n\ndef note(", "\n\n@once\ndef note(", "changed: note"),
    ],
)
def test_changed_code_is_found(old: str, new: str, name: str) -> None:
    assert old in MERGED
    found, _ = compare(BEFORE, {"router/session.py": MERGED.replace(old, new, 1)}, RENAMES)
    assert found[0].splitlines()[0] == name


def test_code_that_is_lost_or_added_or_copied_is_found() -> None:
    assert compare(BEFORE, {**AFTER, "router/late.py": LATE}, RENAMES)[0] == ["copied: note, 1 → 2"]
    more = {"router/session.py": MERGED + "\n\ndef more() -> None:\n    pass\n"}
    assert compare(BEFORE, more, RENAMES)[0] == ["new: more (router/session.py)"]
    less = {"router/session.py": MERGED[: MERGED.index("def note")]}
    assert compare(BEFORE, less, RENAMES)[0] == ["gone: note (router/late.py)"]


def test_revisions_and_the_working_tree_are_read_from_git(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def git(*arguments: str) -> None:
        who = ("-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "commit.gpgsign=false")
        subprocess.run(["git", *who, *arguments], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-q")
    for path, text in BEFORE.items():
        (tmp_path / path).parent.mkdir(exist_ok=True)
        (tmp_path / path).write_text(text)
    git("add", "-A")
    git("commit", "-qm", "before")
    for path in BEFORE:
        (tmp_path / path).unlink()
    (tmp_path / "router/session.py").write_text(MERGED)
    (tmp_path / "plan").write_text("rename router/session.py:_MOST=_SESSION_MOST\n")
    monkeypatch.chdir(tmp_path)
    assert main(["HEAD", "--renames", "plan"]) == 0
    assert capsys.readouterr().out.endswith("\nequal\n")
    git("add", "-A")
    git("commit", "-qm", "after")
    assert main(["HEAD~1", "HEAD"]) == 1
    assert capsys.readouterr().out.endswith("\n3 differences\n")
