"""Parts of a stream that are written past the layers of the server: the same bytes, and only where that is allowed."""

from __future__ import annotations

from typing import Any

import pytest

from frontend.connections import Connection
from frontend.exchange import Exchange


class Cycle:
    """An answer on its way, as uvicorn keeps it."""

    def __init__(self, **changes: Any) -> None:
        self.chunked_encoding: bool | None = True
        self.response_complete = self.disconnected = False
        self.__dict__.update(changes)


class Flow:
    def __init__(self) -> None:
        self.write_paused = False


class Transport:
    def __init__(self) -> None:
        self.written: list[bytes] = []

    def write(self, data: bytes) -> None:
        self.written.append(data)


def connection(**changes: Any) -> Connection:
    made = Connection.__new__(Connection)
    made.cycle, made.flow, made.transport = Cycle(**changes), Flow(), Transport()  # type: ignore[assignment]
    return made


def written(of: Connection) -> list[bytes]:
    return of.transport.written  # type: ignore[attr-defined, no-any-return]


def test_a_part_is_one_chunk_of_http() -> None:
    wire = connection()
    assert wire.push(b"data: x" * 4)
    assert written(wire) == [b"1c\r\n" + b"data: x" * 4 + b"\r\n"]


@pytest.mark.parametrize(
    "changes",
    [
        {
            "chunked_encoding": None
        },  # nothing was sent of this answer yet: another request waits behind the one that is answered
        {"chunked_encoding": False},
        {"response_complete": True},
        {"disconnected": True},
    ],
)
def test_nothing_is_written_where_it_is_not_allowed(changes: dict[str, Any]) -> None:
    wire = connection(**changes)
    assert not wire.push(b"x")
    assert written(wire) == []


def test_nothing_is_written_to_a_client_that_takes_nothing() -> None:
    wire = connection()
    wire.flow.write_paused = True
    assert not wire.push(b"x")
    assert written(wire) == []


def test_an_empty_part_does_not_end_the_answer() -> None:
    wire = connection()
    assert not wire.push(b"")
    assert written(wire) == []


class Pushed:
    """A connection that takes what the test wants."""

    full = lost = False
    whole = True
    watcher: Any = None

    def __init__(self, *, takes: bool) -> None:
        self.takes = takes
        self.pushed: list[bytes] = []

    def push(self, data: bytes) -> bool:
        self.pushed.append(data)
        return self.takes

    def cut(self, last_words: bytes) -> None:
        raise AssertionError("nobody asked for that")


@pytest.mark.parametrize("takes", [True, False])
async def test_what_the_connection_does_not_take_goes_the_usual_way_and_so_does_the_end(*, takes: bool) -> None:
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append((message["body"], message["more_body"]))

    async def receive() -> Any:
        raise AssertionError("nothing is to be read")

    wire = Pushed(takes=takes)
    exchange = Exchange({"headers": [], "headrace.connection": wire}, receive, send)
    await exchange.send_events(b"one")
    await exchange.send_events(b"two", more=False)
    assert wire.pushed == [b"one"]
    assert sent == ([] if takes else [(b"one", True)]) + [(b"two", False)]
