"""Counts in the files of consumers that the rest of the file cannot hold."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.consumer_files import counts_are_possible, set_damaged_aside

NUMBERS = st.integers(0, 2**63)
PENDING = st.lists(st.tuples(NUMBERS, NUMBERS, NUMBERS), max_size=20)
REDELIVERED = st.lists(st.tuples(NUMBERS, NUMBERS), max_size=20)


def encoded(*numbers: int) -> bytes:
    parts = bytearray()
    for number in numbers:
        while number > 0x7F:
            parts.append(number & 0x7F | 0x80)
            number >>= 7
        parts.append(number)
    return bytes(parts)


def state(pending: list[tuple[int, ...]], redelivered: list[tuple[int, ...]], *, version: int = 2, more: int = 0) -> bytes:
    """Return a consumer's file as nats-server writes it; the last count says `more` than there is."""
    numbers = [100, 200, 300, 400, len(pending)]
    if pending:
        numbers.append(1_700_000_000)
    numbers += [number for entry in pending for number in entry[: version + 1]]
    numbers.append(len(redelivered) + more)
    numbers += [number for entry in redelivered for number in entry]
    return bytes((22, version)) + encoded(*numbers)


@given(PENDING, REDELIVERED, st.sampled_from((1, 2)))
def test_a_file_that_was_written_whole_is_possible(
    pending: list[tuple[int, ...]], redelivered: list[tuple[int, ...]], version: int
) -> None:
    assert counts_are_possible(state(pending, redelivered, version=version))


@given(PENDING, REDELIVERED, st.integers(1 << 10, 1 << 60))
def test_a_count_that_the_rest_of_the_file_cannot_hold_is_found(
    pending: list[tuple[int, ...]], redelivered: list[tuple[int, ...]], more: int
) -> None:
    assert not counts_are_possible(state(pending, redelivered, more=more))


@given(st.binary(max_size=60), st.booleans())
def test_no_file_is_possible_that_counts_more_than_its_bytes(garbage: bytes, as_state: bool) -> None:
    """Whatever the bytes are, the reader ends, and a count of pending messages above the length of the file is found."""
    data = bytes((22, 2)) + encoded(1, 1, 2, 2, 1000) + garbage if as_state else garbage
    assert not (counts_are_possible(data) and as_state)


@pytest.mark.parametrize("data", [b"", b"\x16", b"\x00" * 40, b"\x16\x09" + b"\xff" * 40, b"\x16\x02\x01\x01"])
def test_a_file_of_another_kind_or_a_short_one_is_left_to_the_server(data: bytes) -> None:
    assert counts_are_possible(data)


def test_only_the_damaged_files_are_set_aside_and_named(tmp_path: Path) -> None:
    files = {}
    for stream, consumer, more in (("WORK", "one", 0), ("WORK", "two", 1 << 40), ("REQ", "one", 0)):
        folder = tmp_path / "jetstream" / "$G" / "streams" / stream / "obs" / consumer
        folder.mkdir(parents=True)
        (folder / "o.dat").write_bytes(state([], [(1, 1)], more=more))
        files[f"{stream}/{consumer}"] = folder / "o.dat"
    assert set_damaged_aside(tmp_path) == ("WORK/two",)
    assert {name for name, file in files.items() if file.exists()} == {"WORK/one", "REQ/one"}
    assert files["WORK/two"].with_name("o.dat.damaged").exists()
    assert set_damaged_aside(tmp_path) == ()


def test_a_file_that_cannot_be_read_is_left_to_the_server(tmp_path: Path) -> None:
    (tmp_path / "jetstream" / "$G" / "streams" / "WORK" / "obs" / "one" / "o.dat").mkdir(parents=True)
    assert set_damaged_aside(tmp_path) == ()


@pytest.mark.parametrize(("size", "damaged"), [(0, False), (10, True), (15, True), (16, False), (60, False)])
def test_of_encrypted_files_only_those_shorter_than_their_nonce_are_set_aside(tmp_path: Path, size: int, damaged: bool) -> None:
    file = tmp_path / "jetstream" / "$G" / "streams" / "S" / "obs" / "C" / "o.dat"
    file.parent.mkdir(parents=True)
    (file.parent / "meta.key").write_bytes(b"key")
    impossible = (bytes([22, 2, 0, 0, 1, 1]) + b"\xff" * 60)[:size]  # in plain text its counts would be impossible
    file.write_bytes(impossible)
    assert set_damaged_aside(tmp_path) == (("S/C",) if damaged else ())
    assert file.exists() != damaged
