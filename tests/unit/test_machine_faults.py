"""Every way of damaging a store leaves no file of it as it was."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.machine_faults import delete, garble, garble_descriptions, truncate


@pytest.fixture
def store(tmp_path: Path) -> Path:
    folder = tmp_path / "store" / "jetstream" / "stream"
    folder.mkdir(parents=True)
    for name in ("meta.inf", "1.blk"):
        (folder / name).write_bytes(bytes(range(256)) * 4)
    return tmp_path / "store"


def contents(store: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in store.rglob("*") if file.is_file()}


@pytest.mark.parametrize(
    ("damage", "hurt"),
    [(truncate, {"meta.inf", "1.blk"}), (garble, {"meta.inf", "1.blk"}), (garble_descriptions, {"meta.inf"})],
)
def test_it_changes_the_files_that_it_says(store: Path, damage: Callable[[Path], None], hurt: set[str]) -> None:
    before = contents(store)
    damage(store)
    after = contents(store)
    assert {name for name in before if before[name] != after[name]} == hurt


def test_a_deleted_store_is_not_there(store: Path) -> None:
    delete(store)
    assert not store.exists()


def test_a_store_without_files_is_no_store(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="no file with contents"):
        truncate(tmp_path)
