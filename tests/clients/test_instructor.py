"""instructor: a type in, an object of it out, whole and in pieces."""

from __future__ import annotations

import anthropic
import instructor
import pytest
from conftest import CHAT
from openai import OpenAI
from pydantic import BaseModel

HI = [{"role": "user", "content": "Name a place."}]


class Place(BaseModel):
    city: str
    size: int


@pytest.mark.parametrize("mode", [instructor.Mode.TOOLS, instructor.Mode.JSON_SCHEMA, instructor.Mode.TOOLS_STRICT])
def test_by_openais_api(mode: instructor.Mode, url: str) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=mode)
    place = client.chat.completions.create(model=CHAT, response_model=Place, messages=HI, max_tokens=200, max_retries=0)
    assert isinstance(place, Place)


def test_in_pieces(url: str) -> None:
    client = instructor.from_openai(OpenAI(base_url=f"{url}/v1", api_key="none"), mode=instructor.Mode.TOOLS)
    pieces = list(client.chat.completions.create_partial(model=CHAT, response_model=Place, messages=HI, max_tokens=200))
    assert pieces[-1].city is not None


def test_by_anthropics_api(url: str) -> None:
    client = instructor.from_anthropic(anthropic.Anthropic(base_url=url, api_key="none"))
    place = client.messages.create(model=CHAT, response_model=Place, messages=HI, max_tokens=200, max_retries=0)
    assert isinstance(place, Place)
