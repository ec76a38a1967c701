"""The log in a thread: who logs never waits, lines leave in batches, and what is lost is told."""

from __future__ import annotations

import io
import json
import os
import threading
from typing import Any, cast

from headrace.base.logs import LogStream, LogThread

WAIT_S = 30.0


class Reader(io.StringIO):
    """A stream whose reader is frozen until `go`."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self.writing = threading.Event(), threading.Event()
        self.writes: list[str] = []

    def write(self, text: str) -> int:
        self.writing.set()
        assert self.go.wait(WAIT_S)
        self.writes.append(text)
        return len(text)


def started(stream: Any, **options: Any) -> LogThread:
    log = LogThread(stream, **options)
    log.start()
    return log


def test_lines_that_come_while_their_reader_is_frozen_leave_in_one_write() -> None:
    reader = Reader()
    log = started(reader, gather_s=0.0)
    log.write("one\n")
    assert reader.writing.wait(WAIT_S)
    for line in ("two\n", "three\n", "four\n"):
        log.write(line)
    reader.go.set()
    log.close()
    assert reader.writes == ["one\n", "two\nthree\nfour\n"]


def test_what_there_is_no_room_for_is_counted_and_told_when_the_reader_goes_on() -> None:
    reader = Reader()
    lost: list[None] = []
    log = started(reader, gather_s=0.0, most_chars=8)
    log.on_lost = lambda: lost.append(None)
    log.write("one\n")
    assert reader.writing.wait(WAIT_S)
    for line in ("two\n", "too long\n", "six\n", "x"):
        log.write(line)
    assert len(lost) == 2
    reader.go.set()
    log.close()
    *whole, told = "".join(reader.writes).splitlines()
    assert whole == ["one", "two", "six"]
    assert json.loads(told) == {"event": "log.lost", "level": "warning", "writes": 2}


def test_a_full_pipe_whose_reader_is_frozen_holds_up_nobody() -> None:
    read_fd, write_fd = os.pipe()
    line = "x" * 99 + "\n"
    # the reader ends first: a write that stands still would hold up the end of the pipe
    with open(write_fd, "w", encoding="utf-8") as pipe, open(read_fd, "rb") as reader:
        log = started(cast("Any", LogStream(pipe)), most_chars=1 << 18)
        for _ in range(20_000):  # 2 MB: more than the pipe, a write that stands still and the room take
            log.write(line)
        read = b""
        while (counted := written_and_lost(read, line))[0] + counted[1] < 20_000:
            read += reader.read1(1 << 20)
        log.close()
    assert counted[0] + counted[1] == 20_000
    assert counted[1] > 0


def written_and_lost(read: bytes, line: str) -> tuple[int, int]:
    """Return how many lines are there whole, and how many are told to be lost, in one note or in several."""
    lines = read.splitlines(keepends=True)
    lost = (json.loads(each)["writes"] for each in lines if b"log.lost" in each and each.endswith(b"\n"))
    return sum(each == line.encode() for each in lines), sum(lost)


def test_after_its_end_and_in_a_forked_process_it_writes_directly() -> None:
    stream = io.StringIO()
    log = started(stream)
    log.write("before\n")
    log.close()
    log.write("after\n")
    assert stream.getvalue() == "before\nafter\n"
    child = io.StringIO()
    forked = started(child, gather_s=WAIT_S)
    forked.write("the parent's\n")
    forked._forked()  # as in the child of a fork, which has no such thread
    forked.write("the child's\n")
    assert child.getvalue() == "the child's\n"
