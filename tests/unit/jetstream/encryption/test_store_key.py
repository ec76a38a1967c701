"""Which key a store is opened with, and which one is refused before a server begins to leave out what it cannot read."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headrace.jetstream.encryption import key_files
from headrace.jetstream.encryption.key_files import KEY_FILE_BYTES, Wrapping, opens
from headrace.jetstream.encryption.store_key import KEY, MOVED, NOTE, StoreKey, StoreKeyUnusable, note_move, plain_streams

OLD, NEW = "o" * 64, "n" * 64


def stored(data: Path, name: str, key: str | None, *, account: str = "$G") -> Path:
    """Make the folder of a stream, in plain text without a key."""
    stream = data / "store" / "jetstream" / account / "streams" / name
    (stream / "msgs").mkdir(parents=True)
    (stream / "meta.inf").write_text("{}")
    for path, context in ((stream / "meta.key", name), (stream / "msgs" / "1.key", f"{name}:1")) if key else ():
        path.write_bytes(
            key_files._wrapped(
                secrets.token_bytes(32), secrets.token_bytes(key_files.NONCE_BYTES), Wrapping(key or "", account), context
            )
        )
    return stream


def file(data: Path, key: str, name: str = KEY) -> Path:
    path = data / name
    path.touch(0o600)
    path.write_text(key + "\n")
    return path


def test_a_first_start_makes_a_key_that_stays(tmp_path: Path) -> None:
    data = tmp_path / "nats"
    key = StoreKey(data).open()
    assert len(key) == 64
    assert ((data / KEY).stat().st_mode & 0o777, (data / NOTE).stat().st_mode & 0o777) == (0o600, 0o600)
    assert key not in (data / NOTE).read_text()
    stored(data, "S", key)
    assert StoreKey(data).open() == key
    assert StoreKey(tmp_path / "other").open() != key


def test_a_key_elsewhere_is_used_and_none_is_made_beside_the_store(tmp_path: Path) -> None:
    elsewhere = tmp_path / "volume" / "key"
    key = StoreKey(tmp_path / "nats", file=str(elsewhere)).open()
    assert elsewhere.read_text().strip() == key
    assert not (tmp_path / "nats" / KEY).exists()


def test_a_lost_key_is_not_replaced(tmp_path: Path) -> None:
    stored(tmp_path, "S", OLD)
    with pytest.raises(StoreKeyUnusable, match=f"{KEY}, is gone"):
        StoreKey(tmp_path).open()
    assert not (tmp_path / KEY).exists()


@pytest.mark.parametrize("note", [True, False], ids=["with the note of the last start", "without"])
def test_another_key_is_refused(tmp_path: Path, note: bool) -> None:
    file(tmp_path, OLD)
    StoreKey(tmp_path).open()
    stream = stored(tmp_path, "S", OLD)
    if not note:
        (tmp_path / NOTE).unlink()
    file(tmp_path, NEW)
    with pytest.raises(StoreKeyUnusable, match=r"opens 0 of its 1 streams, and not \$G/S"):
        StoreKey(tmp_path).open()
    assert opens(stream, Wrapping(OLD, "$G"))
    file(tmp_path, OLD)
    assert StoreKey(tmp_path).open() == OLD


def test_one_stream_under_another_key_is_refused_and_a_damaged_one_is_not(tmp_path: Path) -> None:
    file(tmp_path, OLD)
    whole, other = stored(tmp_path, "A", OLD), stored(tmp_path, "B", NEW)
    with pytest.raises(StoreKeyUnusable, match=r"opens 1 of its 2 streams, and not \$G/B"):
        StoreKey(tmp_path).open()
    other.rename(tmp_path / "aside")
    StoreKey(tmp_path).open()
    for stream in (whole, stored(tmp_path, "C", OLD)):
        (stream / "meta.key").write_bytes(b"?" * KEY_FILE_BYTES)
    assert StoreKey(tmp_path).open() == OLD, "it is the key of the last start"


@pytest.mark.parametrize("text", ["", "short", "a b" * 20, "ü" * 40, "x" * 513, 'x" }' * 20])
def test_a_file_without_a_usable_key_is_named(tmp_path: Path, text: str) -> None:
    file(tmp_path, text)
    with pytest.raises(StoreKeyUnusable, match=f"{KEY} is unusable"):
        StoreKey(tmp_path).open()


def test_a_key_that_others_may_read_is_told(tmp_path: Path) -> None:
    file(tmp_path, OLD).chmod(0o644)
    with capture_logs() as logs:
        StoreKey(tmp_path).open()
    assert [(entry["event"], entry["mode"]) for entry in logs] == [("server.store_key_open", "0644")]


def test_a_store_that_is_encrypted_is_not_used_without_encryption(tmp_path: Path) -> None:
    stored(tmp_path, "A", None)
    StoreKey(tmp_path).refuse_encrypted()
    stored(tmp_path, "B", OLD)
    with pytest.raises(StoreKeyUnusable, match="--nats-encrypt aes"):
        StoreKey(tmp_path).refuse_encrypted()


def test_a_stream_that_was_moved_is_under_its_new_account(tmp_path: Path) -> None:
    file(tmp_path, OLD)
    stream = stored(tmp_path, "S", OLD)
    stored(tmp_path, "PLAIN", None)
    for account, target in (("$G", "HR"), ("HR", "MINE")):
        note_move(stream, account)
        to = tmp_path / "store" / "jetstream" / target / "streams"
        to.mkdir(parents=True)
        stream = stream.rename(to / "S")
    assert StoreKey(tmp_path).open() == OLD
    assert opens(stream, Wrapping(OLD, "MINE"))
    assert not (stream / MOVED).exists()
    plain = tmp_path / "store" / "jetstream" / "$G" / "streams" / "PLAIN"
    note_move(plain, "$G")
    assert not (plain / MOVED).exists()


def test_a_replaced_key_takes_all_streams_and_the_old_one_is_refused_then(tmp_path: Path) -> None:
    old = file(tmp_path, OLD, "old.key")
    streams = [stored(tmp_path, name, OLD) for name in ("A", "B")]
    file(tmp_path, NEW)
    for _ in range(2):
        assert StoreKey(tmp_path, old_file=str(old)).open() == NEW
    assert all(opens(stream, Wrapping(NEW, "$G")) for stream in streams)
    assert StoreKey(tmp_path).open() == NEW
    with pytest.raises(StoreKeyUnusable, match="is not that of"):
        StoreKey(tmp_path, file=str(old)).open()


@pytest.mark.parametrize("name", [KEY, "old.key"])
def test_a_change_of_the_key_that_was_cut_short_is_finished_and_nothing_else(
    tmp_path: Path, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = file(tmp_path, OLD)
    StoreKey(tmp_path).open()
    streams = [stored(tmp_path, each, OLD) for each in ("A", "B")]
    old = old.rename(tmp_path / "old.key")
    file(tmp_path, NEW)
    with monkeypatch.context() as patched:
        patched.setattr(key_files, "_replace", lambda path, _content: (_ for _ in ()).throw(OSError(28, f"no room for {path}")))
        with pytest.raises(StoreKeyUnusable, match="cannot be written anew"):
            StoreKey(tmp_path, old_file=str(old)).open()
    with pytest.raises(StoreKeyUnusable, match="start with both keys"):
        StoreKey(tmp_path, file=str(tmp_path / name)).open()
    assert StoreKey(tmp_path, old_file=str(old)).open() == NEW
    assert all(opens(stream, Wrapping(NEW, "$G")) for stream in streams)
    assert StoreKey(tmp_path).open() == NEW


def test_an_old_key_that_is_not_there_is_named(tmp_path: Path) -> None:
    file(tmp_path, NEW)
    stored(tmp_path, "S", OLD)
    with pytest.raises(StoreKeyUnusable, match=r"no key in .*gone\.key"):
        StoreKey(tmp_path, old_file=str(tmp_path / "gone.key")).open()


def test_streams_in_plain_text_are_those_without_a_key_that_are_not_being_deleted(tmp_path: Path) -> None:
    stored(tmp_path, "PLAIN", None)
    stored(tmp_path, ".GOING", None)
    stored(tmp_path, "S", OLD)
    (tmp_path / "store" / "jetstream" / "HR" / "streams" / "EMPTY").mkdir(parents=True)
    assert plain_streams(tmp_path / "store") == ["$G/PLAIN"]
