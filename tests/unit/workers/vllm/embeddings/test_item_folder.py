from __future__ import annotations

from pathlib import Path

import pytest

from headrace.workers.vllm.embeddings.item_folder import ItemFolder, LentItems


def files(path: Path) -> set[str]:
    return {file.name for file in path.iterdir()}


def test_an_item_is_there_until_the_last_sequence_that_needs_it_has_ended(tmp_path: Path) -> None:
    lent = LentItems(tmp_path / "items")
    core = ItemFolder(tmp_path / "items")
    lent.lend("one", {"a": b"A", "b": b"B"})
    lent.lend("two", {"a": b"A"})
    assert (core.read("a"), core.read("b")) == (b"A", b"B")
    lent.end("one")
    assert (core.read("a"), core.read("b")) == (b"A", None)
    lent.end("two")
    lent.end("two")
    lent.end("never")
    assert files(tmp_path / "items") == set()


def test_what_the_core_has_written_is_taken_once(tmp_path: Path) -> None:
    lent = LentItems(tmp_path / "items")
    ItemFolder(tmp_path / "items").write("a", b"A")
    assert lent.take("a") == b"A"
    assert lent.take("a") is None
    assert files(tmp_path / "items") == set()


@pytest.mark.parametrize("name", ["../up", "a/b", "", ".a", "x" * 129, "fr:abc"])
def test_no_name_reaches_out_of_the_folder(tmp_path: Path, name: str) -> None:
    (tmp_path / "up").write_bytes(b"other")
    lent = LentItems(tmp_path / "items")
    folder = ItemFolder(tmp_path / "items")
    assert folder.read(name) is None
    folder.remove(name)
    with pytest.raises(OSError, match="no name of an item"):
        folder.write(name, b"x")
    with pytest.raises(OSError, match="no name"):
        lent.lend("one", {"good": b"G", name: b"x"})
    assert files(tmp_path / "items") == set()
    assert (tmp_path / "up").read_bytes() == b"other"


def test_nobody_else_of_the_machine_may_look_into_the_folder(tmp_path: Path) -> None:
    LentItems(tmp_path / "items")
    assert (tmp_path / "items").stat().st_mode & 0o077 == 0
