"""Images through the whole deployment: object store, simulator, cache, router."""

from __future__ import annotations

import base64
import json
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.up_process import RunningUp

pytestmark = pytest.mark.deployment

PNG = b"\x89PNG\r\n\x1a\n"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    folder: Path = tmp_path_factory.mktemp("media")
    running = RunningUp(folder, "--workers", "2", "--routers", "1")
    try:
        running.until_ready()
        yield running
    finally:
        running.stop()


def picture(seed: int, size: int) -> str:
    data = PNG + random.Random(seed).randbytes(size)
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def ask(up: RunningUp, *urls: str, text: str = "What is this? " * 1000, **headers: str) -> httpx.Response:
    content: list[dict[str, Any]] = [{"type": "image_url", "image_url": {"url": url}} for url in urls]
    body = {
        "model": "sim",
        "messages": [{"role": "user", "content": [*content, {"type": "text", "text": text}]}],
        "max_tokens": 8,
    }
    url = up.state()["url"]
    model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
    return httpx.post(f"{url}/v1/chat/completions", json={**body, "model": model}, headers=headers, timeout=20)


def decision(answer: httpx.Response) -> dict[str, Any]:
    made: dict[str, Any] = json.loads(answer.headers["x-headrace-decision"])
    return made


def cached(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    tokens: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return tokens


def test_the_same_image_goes_to_the_same_worker_and_is_found_in_its_cache(up: RunningUp) -> None:
    picked = {"x-headrace-explain": "1"}
    up.until("a router decides", lambda: decision(ask(up, picture(9, 10), text="Hello.", **picked))["known"])
    first, other = picture(1, 5_000_000), picture(2, 5_000_000)
    answers = [ask(up, first, **picked)]
    time.sleep(2)  # the router hears of the blocks a little later than the client of the answer
    answers += [ask(up, first, **picked) for _ in range(3)]
    assert cached(answers[0]) == 0
    assert all(cached(answer) > 3000 for answer in answers[1:])  # the text comes after the image
    workers = {decision(answer)["worker"] for answer in answers}
    assert len(workers) == 1
    said = {answer.json()["choices"][0]["message"]["content"] for answer in answers}
    assert len(said) == 1
    unlike = ask(up, other)
    assert cached(unlike) < 64  # at most what is before the image
    assert unlike.json()["choices"][0]["message"]["content"] not in said


def test_an_image_takes_its_place_in_the_prompt(up: RunningUp) -> None:
    small = picture(3, 100)
    plain = ask(up)
    with_image = ask(up, small)
    assert with_image.json()["usage"]["prompt_tokens"] - plain.json()["usage"]["prompt_tokens"] in (64, 65)  # and a line end


def test_an_address_of_this_machine_is_not_asked(up: RunningUp) -> None:
    answer = ask(up, up.state()["url"] + "/metrics")
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "media_forbidden")
