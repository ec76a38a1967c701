"""Finds files of consumers in a store of nats-server that would make it ask for more memory than the machine has.

nats-server keeps the state of a consumer in a file without a checksum. It believes the counts in that file and asks for memory
for so many entries before it reads the first: one garbled number costs all memory of the machine, and the server answers no
more (seen with 2.15.1, which asked for 459 billion entries because of a file of 16 bytes). A count that the rest of the file
cannot hold is therefore looked for before each start.

The format is that of `decodeConsumerState` in nats-server's filestore.go: two bytes, magic and version; numbers of variable
length, which are the ack floor and the last delivered message, each by consumer and by stream; then the count of pending
messages, the smallest timestamp and the entries, if there are any; then the same of redelivered messages without a timestamp.
An encrypted file begins with a nonce, and may begin with any bytes; the server notices itself where the rest is not whole.
"""

from __future__ import annotations

from pathlib import Path

META_KEY = "meta.key"  # of an encrypted consumer
NONCE_BYTES = 16
MAGIC = 22
VERSIONS = {1: 2, 2: 3}  # numbers per pending message: its sequence in the stream, its delivery since version 2, its timestamp
POSITIONS = 4
PER_REDELIVERED = 2
MAX_NUMBER_BYTES = 10
DAMAGED_SUFFIX = ".damaged"


def counts_are_possible(state: bytes) -> bool:
    """Return False if the file counts more entries than it can hold, which nats-server would find too late.

    A file of another kind, an encrypted or a shorter one is possible: nats-server finds out itself what is wrong with it.
    """
    if len(state) < 2 or state[0] != MAGIC or state[1] not in VERSIONS:
        return True
    numbers = _Numbers(state, 2)
    try:
        numbers.skip(POSITIONS)
        for per_entry, before in ((VERSIONS[state[1]], 1), (PER_REDELIVERED, 0)):
            if not (count := numbers.next()):
                continue
            if count * per_entry + before > numbers.left:
                return False
            numbers.skip(before + count * per_entry)
    except _EndOfFileError:
        pass
    return True


def encrypted_is_possible(state: bytes) -> bool:
    """Return False if an encrypted file is shorter than its nonce, of which nats-server dies; all else it notices itself."""
    return not 0 < len(state) < NONCE_BYTES


def set_damaged_aside(store: Path) -> tuple[str, ...]:
    """Give each consumer's file that nats-server would not bear another name, and return `stream/consumer`.

    Such a consumer begins again at the first message that its stream has, as one without a file does.
    """
    damaged = []
    for file in sorted(store.glob("jetstream/*/streams/*/obs/*/o.dat")):
        try:
            state = file.read_bytes()
        except OSError:
            continue  # nats-server says itself what it cannot read
        encrypted = file.with_name(META_KEY).exists()
        if not (encrypted_is_possible(state) if encrypted else counts_are_possible(state)):
            file.replace(file.with_name(file.name + DAMAGED_SUFFIX))
            damaged.append(f"{file.parts[-4]}/{file.parts[-2]}")
    return tuple(damaged)


class _EndOfFileError(Exception):
    """The file ends within a number."""


class _Numbers:
    """Reads numbers of variable length, seven bits a byte, the lowest first."""

    def __init__(self, data: bytes, at: int) -> None:
        self._data = data
        self._at = at

    @property
    def left(self) -> int:
        """The bytes that are not read yet; no number is shorter than one."""
        return len(self._data) - self._at

    def next(self) -> int:
        value = 0
        for place, byte in enumerate(self._data[self._at : self._at + MAX_NUMBER_BYTES]):
            value |= (byte & 0x7F) << (7 * place)
            if byte < 0x80:
                self._at += place + 1
                return value
        raise _EndOfFileError

    def skip(self, numbers: int) -> None:
        for _ in range(numbers):
            self.next()
