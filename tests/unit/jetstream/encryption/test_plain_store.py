"""A store in plain text is exchanged for an encrypted copy, wholly or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from headrace.jetstream.encryption.plain_store import COPY, PLAIN, encrypt_store, settle
from headrace.jetstream.encryption.store_key import StoreKeyUnusable

STREAM = Path("jetstream", "$G", "streams", "S")


def make(folder: Path, text: str) -> None:
    (folder / STREAM / "msgs").mkdir(parents=True)
    (folder / STREAM / "meta.inf").write_text(text)
    (folder / STREAM / "msgs" / "1.blk").write_text(text)
    (folder / STREAM / "msgs" / "index.db").write_text(text)


def text(data: Path) -> str:
    return (data / "store" / STREAM / "msgs" / "1.blk").read_text()


def encrypting(data: Path, *, keys: bool = True) -> None:
    """Do as a server would that encrypts a copy; without `keys` for blocks that are left in plain text."""
    stream = data / "store" / STREAM
    assert not (stream / "msgs" / "index.db").exists(), "without it a server reads every block"
    (stream / "meta.key").write_text("key")
    if keys:
        (stream / "msgs" / "1.blk").write_text("encrypted")
        (stream / "msgs" / "1.key").write_text("key")


def test_the_copy_takes_the_place_of_the_store_and_no_plain_text_is_left(tmp_path: Path) -> None:
    make(tmp_path / "store", "plain")
    encrypt_store(tmp_path, ["$G/S"], lambda data, _seconds: encrypting(data))
    assert text(tmp_path) == "encrypted"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_stream_that_the_server_could_not_read_is_kept_and_told(tmp_path: Path) -> None:
    make(tmp_path / "store", "plain")
    with capture_logs() as logs:
        encrypt_store(tmp_path, ["$G/S"], lambda _data, _seconds: None)
    assert [entry["streams"] for entry in logs if entry["event"] == "server.streams_not_encrypted"] == [["$G/S"]]
    assert text(tmp_path) == "plain"


@pytest.mark.parametrize("why", ["fails", "leaves a block in plain text"])
def test_until_the_copy_is_whole_the_store_is_as_it_was(tmp_path: Path, why: str) -> None:
    make(tmp_path / "store", "plain")

    def run(data: Path, _seconds: float) -> None:
        encrypting(data, keys=False)
        if why == "fails":
            raise OSError(why)

    with pytest.raises((OSError, StoreKeyUnusable), match=r"fails|S for one: it is as it was"):
        encrypt_store(tmp_path, ["$G/S"], run)
    assert text(tmp_path) == "plain"
    settle(tmp_path)
    assert text(tmp_path) == "plain"
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    encrypt_store(tmp_path, ["$G/S"], lambda data, _seconds: encrypting(data))
    assert text(tmp_path) == "encrypted"


@pytest.mark.parametrize(
    ("there", "after"),
    [
        ({"store": "plain", f"{COPY}/store": "half"}, "plain"),
        ({PLAIN: "plain", f"{COPY}/store": "encrypted"}, "encrypted"),
        ({PLAIN: "plain", "store": "encrypted"}, "encrypted"),
        ({PLAIN: "plain", "store": "encrypted", f"{COPY}/run": "x"}, "encrypted"),
        ({"store": "encrypted"}, "encrypted"),
    ],
    ids=[
        "while it is encrypted",
        "between the exchanges",
        "before the old one is gone",
        "before the copy's folder is gone",
        "after",
    ],
)
def test_a_kill_at_any_step_leaves_one_whole_store(tmp_path: Path, there: dict[str, str], after: str) -> None:
    for name, content in there.items():
        make(tmp_path / name, content)
    settle(tmp_path)
    assert text(tmp_path) == after
    assert [path.name for path in tmp_path.iterdir()] == ["store"]


def test_a_folder_in_which_nothing_was_stored_yet_is_left_alone(tmp_path: Path) -> None:
    settle(tmp_path / "none")
    assert not (tmp_path / "none").exists()
