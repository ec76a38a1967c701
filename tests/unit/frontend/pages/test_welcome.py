"""The answer of `/`: for programs, and for browsers."""

from __future__ import annotations

import shlex

import msgspec

from tests.support.frontend.fakes import MODEL, Call, FakeIngress, frontend, get, post

BROWSER = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8", "host": 'gpu"><b>:8000'}
ANY = {"allowed_hosts": ("*",)}


async def test_a_program_is_told_what_is_served_and_how_to_ask_it() -> None:
    built = frontend(FakeIngress())
    answer = (await get(built.app, "/")).json()
    assert (answer["name"], answer["models"]) == ("Headrace", [MODEL])
    for path in answer["links"].values():
        assert (await get(built.app, path)).status == 200
    words = shlex.split(answer["example"])
    call = await post(built.app, msgspec.json.decode(words[words.index("-d") + 1]))
    assert call.json()["choices"][0]["message"]["content"] == "Hello world"


async def test_a_browser_gets_a_page_in_which_nothing_that_was_sent_is_html() -> None:
    call = await Call(frontend(FakeIngress(), **ANY).app, "/", method="GET", headers=BROWSER).run()
    page = call.body.decode()
    assert call.headers["content-type"].startswith("text/html")
    assert f"<code>{MODEL}</code>" in page
    assert "<b>" not in page


async def test_a_server_without_workers_says_so() -> None:
    ingress = FakeIngress()
    ingress.models.served[MODEL].workers = 0
    call = await Call(frontend(ingress, **ANY).app, "/", method="GET", headers=BROWSER).run()
    assert "no worker is ready" in call.body.decode()
    assert (await get(frontend(ingress).app, "/")).json()["models"] == []


async def test_head_tells_that_the_server_is_there() -> None:
    call = await Call(frontend(FakeIngress()).app, "/", method="HEAD").run()
    assert call.status == 200  # the HTTP server leaves the body out
