"""Purposes, names and lives of files."""

from __future__ import annotations

import pytest

from headrace.broker.files.errors import FileInvalid
from headrace.broker.files.records import (
    check_filename,
    check_life,
    check_purpose,
)


@pytest.mark.parametrize(("given", "kept"), [("a.jsonl", "a.jsonl"), ("/etc/passwd", "passwd"), ("C:\\x\\y.txt", "y.txt")])
def test_a_filename_has_no_folders(given: str, kept: str) -> None:
    assert check_filename(given) == kept


@pytest.mark.parametrize("name", ["", "a/", "a\nb", "\x00", "x" * 256])
def test_a_bad_filename_is_refused(name: str) -> None:
    with pytest.raises(FileInvalid) as caught:
        check_filename(name)
    assert caught.value.param == "file"


def test_only_purposes_of_inputs_are_taken() -> None:
    assert check_purpose("fine-tune") == "fine-tune"
    for purpose in ("batch_output", "", "Batch"):
        with pytest.raises(FileInvalid, match="is not one of"):
            check_purpose(purpose)


def test_a_life_is_from_an_hour_to_thirty_days() -> None:
    assert check_life(None, None) is None
    assert check_life("created_at", 3600) == 3600
    for anchor, seconds in (
        ("created_at", 3599),
        ("created_at", 2592001),
        ("created_at", None),
        ("last_used", 3600),
        (None, 3600),
    ):
        with pytest.raises(FileInvalid, match="expires_after"):
            check_life(anchor, seconds)
