"""Scratch files keep what is appended, within their space, and leave nothing behind."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import pytest

from headrace.broker.batches.scratch_space import ScratchFile, ScratchSpace


async def test_what_was_appended_is_read_by_its_places(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    file = ScratchFile(ScratchSpace(100))
    await file.append([b"one", b"two"])
    await file.append([b"three"])
    assert file.size == 11
    assert await file.read({7: (3, 3), 8: (6, 5)}) == {7: b"two", 8: b"three"}
    assert not list(tmp_path.iterdir())
    file.close()


async def test_all_files_share_one_space_and_give_it_back() -> None:
    space = ScratchSpace(10)
    one, two = ScratchFile(space), ScratchFile(space)
    await one.append([b"123456"])
    with pytest.raises(OSError, match="as many bytes as they may"):
        await two.append([b"12345"])
    assert space.left == 4
    one.close()
    one.close()
    assert space.left == 10
    two.close()


async def test_a_closed_file_has_nothing_and_takes_nothing() -> None:
    file = ScratchFile(ScratchSpace(100))
    await file.append([b"one"])
    file.close()
    with pytest.raises(OSError, match="removed"):
        await file.read({1: (0, 3)})


async def test_bytes_that_are_gone_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    file = ScratchFile(ScratchSpace(100))
    await file.append([b"one"])
    monkeypatch.setattr(os, "pread", lambda *_: b"o")
    with pytest.raises(OSError, match="not there as a whole"):
        await file.read({1: (0, 3)})
    file.close()
