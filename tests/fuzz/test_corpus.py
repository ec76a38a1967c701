"""Every decoder reads its corpus, and seeded mutations of it, without an error that nothing foresaw."""

from __future__ import annotations

import contextlib
import random
from pathlib import Path

import pytest

from tests.fuzz.targets import READERS, TARGETS

CORPUS = Path(__file__).parent / "corpus"
MUTATIONS = 60  # of each file


def mutated(data: bytes, chance: random.Random) -> bytes:
    changed = bytearray(data)
    for _ in range(chance.randint(1, 6)):
        at = chance.randint(0, len(changed))
        what = chance.randint(0, 3)
        if what == 0:
            changed[at:at] = chance.randbytes(chance.randint(1, 4))
        elif what == 1:
            del changed[at : at + chance.randint(1, 8)]
        elif what == 2 and changed:
            changed[min(at, len(changed) - 1)] = chance.randint(0, 255)
        else:
            changed[at:at] = changed[at : at + chance.randint(1, 32)]
    return bytes(changed)


@pytest.mark.parametrize("name", TARGETS)
def test_a_decoder_reads_its_corpus_and_what_is_like_it(name: str) -> None:
    files = sorted((CORPUS / name).iterdir())
    assert files, "a target without a corpus tests little"
    chance = random.Random(name)  # the same in every run
    for file in files:
        data = file.read_bytes()
        TARGETS[name](data)
        for _ in range(MUTATIONS):
            changed = mutated(data, chance)
            try:
                TARGETS[name](changed)
            except Exception as error:
                raise AssertionError(f"{name} fails for {changed!r}") from error


@pytest.mark.parametrize(("name", "reader"), [(name, reader) for name in TARGETS for reader in READERS[name]])
def test_the_corpus_has_something_that_each_reader_takes(name: str, reader: str) -> None:
    """So that mutations reach what comes behind the first bytes."""
    taken = []
    for file in sorted((CORPUS / name).iterdir()):
        with contextlib.suppress(Exception):
            READERS[name][reader](file.read_bytes())
            taken.append(file.name)
    assert taken
