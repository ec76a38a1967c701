"""Purposes, names and lives of files."""

from __future__ import annotations

import pytest

from headrace.broker.files.errors import FileInvalid
from headrace.broker.files.records import (
    check_filename,
    check_life,
    check_purpose,
    is_file_id,
    is_part_id,
    is_upload_id,
    life_of,
    new_file_id,
    new_part_id,
    new_upload_id,
)


def test_new_ids_are_ids_and_fit_into_keys() -> None:
    assert is_file_id(new_file_id())
    assert is_upload_id(new_upload_id())
    assert is_part_id(new_part_id())
    assert not is_upload_id(new_file_id())


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


def test_batches_expire_where_nothing_else_is_asked_for() -> None:
    assert (life_of("batch", None), life_of("batch_output", None), life_of("vision", None)) == (2592000, 2592000, None)
    assert life_of("batch", 3600) == life_of("vision", 3600) == 3600
