"""Key files of an encrypted store, written anew for another account and another key."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest

from headrace.jetstream.encryption import key_files
from headrace.jetstream.encryption.key_files import KEY_FILE_BYTES, NONCE_BYTES, Wrapping, opens, wrap_again

ONE = Wrapping("one" * 20, "$G")
TWO = Wrapping("two" * 20, "HR")
FILES = {"meta.key": "S", "msgs/1.key": "S:1", "msgs/12.key": "S:12", "obs/taker/meta.key": "S.taker"}


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    folder = tmp_path / "S"
    for name, context in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(key_files._wrapped(secrets.token_bytes(32), secrets.token_bytes(NONCE_BYTES), ONE, context))
    return folder


def held(stream: Path, wrapping: Wrapping) -> dict[str, bytes | None]:
    return {name: key_files._unwrapped((stream / name).read_bytes(), wrapping, context) for name, context in FILES.items()}


def test_every_key_stays_and_is_under_the_new_one_alone(stream: Path) -> None:
    before = held(stream, ONE)
    nonces = {name: (stream / name).read_bytes()[:NONCE_BYTES] for name in FILES}
    assert all(before.values())
    assert wrap_again(stream, TWO, [ONE]) == 0
    assert held(stream, TWO) == before
    assert not any(held(stream, ONE).values())
    assert {name: (stream / name).read_bytes()[:NONCE_BYTES] for name in FILES} == nonces, (
        "a block is encrypted under its nonce, too"
    )
    assert {path.name for path in stream.rglob("*") if path.is_file()} == {Path(name).name for name in FILES}
    assert (opens(stream, TWO), opens(stream, ONE)) == (True, False)


def test_what_was_cut_short_is_finished(stream: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, left = held(stream, ONE), [2]

    def fails(path: Path, content: bytes) -> None:
        left[0] -= 1
        if left[0] < 0:
            raise OSError("full")
        path.write_bytes(content)

    with monkeypatch.context() as patched:
        patched.setattr(key_files, "_replace", fails)
        with pytest.raises(OSError, match="full"):
            wrap_again(stream, TWO, [ONE])
    assert opens(stream, ONE), "the stream's own key comes last"
    assert wrap_again(stream, TWO, [ONE]) == 0
    assert held(stream, TWO) == before


@pytest.mark.parametrize("damaged", [b"", b"?" * KEY_FILE_BYTES, b"?" * 20])
def test_a_key_that_nothing_opens_is_counted_and_left_as_it_is(stream: Path, damaged: bytes) -> None:
    (stream / "msgs" / "1.key").write_bytes(damaged)
    assert wrap_again(stream, TWO, [ONE]) == 1
    assert (stream / "msgs" / "1.key").read_bytes() == damaged
    assert opens(stream, TWO)
    (stream / "meta.key").write_bytes(damaged)
    assert not opens(stream, TWO)


def test_a_stream_without_a_key_is_not_opened(tmp_path: Path) -> None:
    assert not opens(tmp_path, ONE)
