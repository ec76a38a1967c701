"""The index of an object's chunks, and what others see of a description."""

from __future__ import annotations

import hashlib

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.jetstream.objects import (
    INDEX,
    ObjectInfo,
    ObjectSubjects,
    decode_index,
    decode_name,
    encode_digest,
    encode_index,
    encode_name,
)

SEQUENCES = st.lists(st.integers(min_value=1, max_value=1 << 62), max_size=200)


@given(SEQUENCES)
def test_an_index_gives_back_the_sequences_also_those_out_of_order(sequences: list[int]) -> None:
    assert decode_index(encode_index(sequences)) == sequences


def test_the_index_of_a_large_object_is_small() -> None:
    """512 MiB beside another writer, whose chunks lie between its own; a description has to fit into a message."""
    mixed = [7_000_000 + 2 * n + n % 3 for n in range(4096)]
    assert len(encode_index(list(range(9, 9 + 4096)))) < 64
    assert len(encode_index(mixed)) < 8192


@pytest.mark.parametrize("text", ["", "!", "AAAA", encode_index([300])[:-6] + "AAAAAA"])
def test_a_damaged_index_is_an_error(text: str) -> None:
    with pytest.raises(ValueError, match="index"):
        decode_index(text)


def test_an_index_that_ends_inside_a_number_is_an_error() -> None:
    import base64
    import zlib

    with pytest.raises(ValueError, match="middle"):
        decode_index(base64.b64encode(zlib.compress(b"\x80")).decode())


@given(st.text(max_size=60))
def test_any_name_is_a_token(name: str) -> None:
    token = encode_name(name)
    assert decode_name(token) == name
    assert not set(token) & set(" .*>\r\n")


def test_the_public_description_has_the_digest_and_not_the_index() -> None:
    digest = hashlib.sha256(b"x")
    info = ObjectInfo(
        name="a",
        bucket="b",
        nuid="n",
        size=1,
        chunks=2,
        digest=encode_digest(digest.digest()),
        mtime="2026-01-01T00:00:00+00:00",
    )
    info.metadata = {INDEX: encode_index([3, 4]), "purpose": "batch"}
    seen = info.public()
    assert (seen.digest, seen.stored, seen.metadata) == (digest.hexdigest(), 1767225600.0, {"purpose": "batch"})
    assert info.sequences() == [3, 4]
    assert ObjectInfo(name="a", bucket="b", nuid="n").public().digest == ""


def test_descriptions_of_other_clients_are_read() -> None:
    """As the `nats` tool writes them."""
    raw = (
        b'{"name":"x","description":"d","headers":{"A":["b"]},"options":{"max_chunk_size":131072},"bucket":"b","nuid":"n",'
        b'"size":3,"mtime":"2026-11-23T10:00:00.123456789Z","chunks":1,"digest":"SHA-256=ungWv48Bz-pBQUDeXa4iI7ADYaOWF3qctBD_YfIAFa0="}'
    )
    info = msgspec.json.decode(raw, type=ObjectInfo)
    assert info.sequences() == []
    assert info.sha256() == hashlib.sha256(b"abc").digest()
    assert info.public().stored == pytest.approx(1795428000.123, abs=0.001)


def test_subjects_are_those_of_the_stream() -> None:
    subjects = ObjectSubjects("hr_files")
    assert subjects.stream == "OBJ_hr_files"
    assert subjects.chunks("n") == "$O.hr_files.C.n"
    assert subjects.description("a b") == "$O.hr_files.M.YSBi"
