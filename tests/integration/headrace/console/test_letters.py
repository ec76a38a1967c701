"""The console runs dead letters again and drops them, on a real server."""

from __future__ import annotations

import httpx

from headrace.broker.models.directory import publish_card
from headrace.console.app import ConsoleOptions, build_console
from headrace.console.guard import KEY_HEADER
from headrace.console.readers import MOST_LETTERS, Readers
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects
from tests.integration.broker.test_job_path import CARD, nothing_stored, worker
from tests.integration.headrace.test_dlq import advise, bury

KEY = "the-key-of-this-console"


def console(connection: Connection, subjects: Subjects) -> httpx.AsyncClient:
    app = build_console(connection, subjects, ConsoleOptions(key=KEY)).app
    return httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://localhost", headers={KEY_HEADER: KEY}, timeout=60
    )


async def test_a_letter_that_is_run_again_is_answered_and_gone(connection: Connection, subjects: Subjects) -> None:
    await publish_card(connection, subjects, CARD, {"tokenizer.json": b"{}"})
    number = await bury(connection, subjects, "r1")
    rows = await Readers(connection, subjects).letters()
    assert (rows[str(number)]["request"], rows[str(number)]["reason"]) == ("r1", "poison")
    async with worker(connection, subjects, "w1"), console(connection, subjects) as http:
        told = await http.post(f"/console/api/letters/{number}/retry")
        assert told.status_code == 200, told.text
        await nothing_stored(connection, subjects)
    assert await Readers(connection, subjects).letters() == {}


async def test_a_letter_that_cannot_be_run_stays_and_says_why(connection: Connection, subjects: Subjects) -> None:
    number, advice = await bury(connection, subjects, "r1"), await advise(connection, subjects)
    async with console(connection, subjects) as http:
        unserved = await http.post(f"/console/api/letters/{number}/retry")
        nothing = await http.post(f"/console/api/letters/{advice}/retry")
    assert (unserved.status_code, nothing.status_code) == (409, 409)
    assert "'m'" in unserved.json()["error"]["message"]
    assert "no request" in nothing.json()["error"]["message"]
    assert set(await Readers(connection, subjects).letters()) == {str(number), str(advice)}


async def test_a_letter_is_dropped_once(connection: Connection, subjects: Subjects) -> None:
    number = await bury(connection, subjects, "r1")
    async with console(connection, subjects) as http:
        codes = [(await http.post(f"/console/api/letters/{number}/drop")).status_code for _ in range(2)]
    assert codes == [200, 409]


async def test_only_the_newest_letters_are_read(connection: Connection, subjects: Subjects) -> None:
    numbers = [await bury(connection, subjects, f"r{n}") for n in range(MOST_LETTERS + 5)]
    rows = await Readers(connection, subjects).letters()
    assert [int(row) for row in rows] == numbers[5:]
