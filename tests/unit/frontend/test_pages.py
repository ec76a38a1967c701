"""The page `/docs`: complete, escaped, and without anything from other hosts."""

from __future__ import annotations

import json
import re
import shlex
from html.parser import HTMLParser
from typing import Any

import msgspec

from headrace.frontend.openapi import build_openapi
from headrace.frontend.pages import reference_page
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, frontend, get, post

DOCUMENT: dict[str, Any] = json.loads(build_openapi())
VOID = {"meta", "br"}


class Reader(HTMLParser):
    """Collects what a page has, and checks that every element is closed."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.ids: list[str] = []
        self.links: list[str] = []
        self.tags: set[str] = set()
        self.open: list[str] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        found = dict(attrs)
        if found.get("id"):
            self.ids.append(str(found["id"]))
        if found.get("href"):
            self.links.append(str(found["href"]))
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_every_route_and_every_type_has_a_place_and_every_link_leads_to_one() -> None:
    page = reference_page(DOCUMENT).decode()
    read = Reader(page)
    assert not read.open
    assert len(read.ids) == len(set(read.ids))
    assert set(DOCUMENT["components"]["schemas"]) <= set(read.ids)
    for path, item in DOCUMENT["paths"].items():
        for method in item.keys() - {"parameters"}:
            assert re.sub(r"[{}]", "", method + path.replace("/", "-")) in read.ids
    assert {link[1:] for link in read.links if link.startswith("#")} <= set(read.ids)


def test_the_fields_of_a_type_are_shown_with_their_ranges() -> None:
    schema = {
        "T": {
            "type": "object",
            "required": ["a"],
            "properties": {
                "a": {"type": "integer", "minimum": 1},
                "b": {"anyOf": [{"type": "string", "maxLength": 5}, {"type": "null"}], "default": None},
                "c": {"type": "array", "items": {"$ref": "#/components/schemas/T"}},
                "d": {"enum": ["x<y", None]},
            },
        }
    }
    info = {"title": "a<b", "version": "1", "description": "&"}
    page = reference_page({"info": info, "paths": {}, "components": {"schemas": schema}}).decode()
    assert "a&lt;b" in page
    assert '<code>a</code></td><td>integer <span class="dim">(≥ 1)</span></td><td class="dim">required</td>' in page
    assert '<code>b</code></td><td>string <span class="dim">(0 to 5 characters)</span></td><td class="dim"></td>' in page
    assert '<code>c</code></td><td>list of <a href="#T">T</a></td>' in page
    assert "<code>x&lt;y</code>" in page


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
