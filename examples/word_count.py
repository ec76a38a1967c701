"""An HTTP API of your own: `POST /words/count` counts the words of a text.

docs/add-an-http-route.md walks through it. Your package declares it in its pyproject.toml:

    [project.entry-points."headrace.apis"]
    words = "word_count:API"
"""

from __future__ import annotations

from typing import Any

import msgspec

from headrace.frontend.apis import HttpApi, Site
from headrace.frontend.http.bodies import decode_request
from headrace.frontend.http.exchange import HttpExchange
from headrace.frontend.openapi import generation


class WordsRequest(msgspec.Struct, kw_only=True):
    """A text."""

    text: str


class WordsAnswer(msgspec.Struct, kw_only=True):
    """The number of its words."""

    count: int


_decoder = msgspec.json.Decoder(WordsRequest)


async def _count(body: bytes, exchange: HttpExchange) -> bytes:
    request = await decode_request(_decoder, body)
    return msgspec.json.encode(WordsAnswer(count=len(request.text.split())))


def _mount(site: Site) -> None:
    site.answer("/words/count", _count)


def _paths() -> dict[str, Any]:
    return {"/words/count": {"post": generation("Count the words of a text", "WordsRequest", "WordsAnswer", streams=False)}}


API = HttpApi(mount=_mount, paths=_paths, types=(WordsRequest, WordsAnswer))
