"""Blocks that nats-server was killed in the midst of making are removed, and nothing else is."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.jetstream.encryption.key_files import META_KEY
from headrace.jetstream.encryption.unfinished_blocks import remove_unfinished_blocks


def stream(store: Path, name: str, *, encrypted: bool = True) -> Path:
    messages = store / "jetstream" / "$G" / "streams" / name / "msgs"
    messages.mkdir(parents=True)
    if encrypted:
        (messages.parent / META_KEY).write_bytes(b"k")
    (messages / "1.blk").write_bytes(b"messages")
    (messages / "1.key").write_bytes(b"k")
    return messages


def test_an_empty_block_without_a_key_is_removed_and_its_stream_named(tmp_path: Path) -> None:
    messages = stream(tmp_path, "REQ")
    (messages / "2.blk").touch()
    (messages / "2.key.tmp").touch()
    stream(tmp_path, "WORK")
    assert remove_unfinished_blocks(tmp_path) == ("REQ",)
    assert sorted(file.name for file in messages.glob("*.blk")) == ["1.blk"]
    assert remove_unfinished_blocks(tmp_path) == ()


@pytest.mark.parametrize(
    ("content", "key", "encrypted"),
    [(b"m", False, True), (b"", True, True), (b"", False, False)],
    ids=["with messages", "with a key", "in plain text"],
)
def test_any_other_block_stays(tmp_path: Path, content: bytes, key: bool, encrypted: bool) -> None:
    messages = stream(tmp_path, "REQ", encrypted=encrypted)
    (messages / "2.blk").write_bytes(content)
    if key:
        (messages / "2.key").write_bytes(b"k")
    assert remove_unfinished_blocks(tmp_path) == ()
    assert (messages / "2.blk").exists()


def test_a_store_that_is_not_there_has_none(tmp_path: Path) -> None:
    assert remove_unfinished_blocks(tmp_path / "none") == ()
