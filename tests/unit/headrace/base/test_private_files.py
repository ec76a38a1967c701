"""Folders that only their user can use."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headrace.base.process import make_private_folder


def test_a_new_folder_is_private_whatever_the_umask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    before = os.umask(0)
    try:
        make_private_folder(tmp_path / "data")
    finally:
        os.umask(before)
    assert (tmp_path / "data").stat().st_mode & 0o777 == 0o700


def test_an_open_folder_is_closed_and_named(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    folder.mkdir(mode=0o755)
    folder.chmod(0o755)
    with capture_logs() as logs:
        make_private_folder(folder)
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [(line["event"], line["mode"]) for line in logs] == [("folder.made_private", "0755")]


def test_a_folder_of_another_user_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_args: object, **_more: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    folder = tmp_path / "data"
    folder.mkdir()
    folder.chmod(0o755)
    monkeypatch.setattr(Path, "chmod", refuse)
    with capture_logs() as logs:
        make_private_folder(folder)
    assert logs[0]["event"] == "folder.not_private"
    assert logs[0]["folder"] == str(folder)
