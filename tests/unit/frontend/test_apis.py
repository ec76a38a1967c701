"""The registry of HTTP APIs: one of another package is served and described, and a wrong one is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from importlib.metadata import EntryPoint

import pytest

from headrace.base.errors import SettingsError
from headrace.frontend import apis
from headrace.frontend.apis import API_GROUP, HttpApi, load_apis
from headrace.frontend.openapi import build_openapi
from tests.support.frontend.fakes import FakeIngress, frontend, get, post

TWICE = HttpApi(mount=lambda site: site.answer("/tokenize", lambda body, exchange: NotImplemented))
Install = Callable[..., None]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    def installed(**points: str) -> None:
        found = [EntryPoint(name, value, API_GROUP) for name, value in points.items()]
        monkeypatch.setattr(apis, "entry_points", lambda *, group: found if group == API_GROUP else [])
        load_apis.cache_clear()
        build_openapi.cache_clear()

    yield installed
    load_apis.cache_clear()
    build_openapi.cache_clear()


async def test_an_api_of_another_package_is_served_and_described(install: Install) -> None:
    install(words="examples.word_count:API")
    app = frontend(FakeIngress()).app
    call = await post(app, {"text": "one two three"}, "/words/count")
    assert (call.status, call.json()) == (200, {"count": 3})
    assert (await post(app, {"text": 1}, "/words/count")).json()["error"]["param"] == "text"
    assert (await get(app, "/words/count")).status == 405
    document = (await get(app, "/openapi.json")).json()
    assert "/words/count" in document["paths"]
    assert "WordsAnswer" in document["components"]["schemas"]


def test_a_built_in_name_cannot_be_taken(install: Install) -> None:
    built_in = load_apis()
    install(openai="examples.word_count:API")
    assert load_apis() == built_in


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("no_such_package:API", r"'words' \(no_such_package:API\) cannot be loaded: No module named"),
        ("examples.word_count:MISSING", "cannot be loaded: .*MISSING"),
        ("examples.word_count:WordsAnswer", "not an HttpApi"),
    ],
)
def test_one_that_cannot_be_loaded_is_refused_by_its_name(install: Install, value: str, words: str) -> None:
    install(words=value)
    with pytest.raises(SettingsError, match=words):
        load_apis()


def test_a_path_is_served_by_one_api(install: Install) -> None:
    install(again=f"{__name__}:TWICE")
    with pytest.raises(SettingsError, match="two HTTP APIs serve POST /tokenize"):
        frontend(FakeIngress())
