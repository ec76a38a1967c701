"""Asks a chat question over HTTP and reads the streamed answer, as any client of OpenAI's API does."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from headrace.base.errors import CommandError

_SILENT_S = 30.0  # the longest wait for the next piece


class NoAnswer(CommandError):
    """A question was not answered."""


@dataclass(slots=True)
class Answer:
    """An answer as it was read. `arrived_s` has the time of each piece of text, by a monotonic clock."""

    worker: str = ""  # that the router chose
    request_id: str = ""
    pieces: list[str] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int = 0  # by its usage
    prompt_tokens: int = 0
    cached_tokens: int = 0  # of the prompt

    @property
    def text(self) -> str:
        """The whole text so far."""
        return "".join(self.pieces)

    def take(self, event: dict[str, Any], now_s: float) -> str:
        """Add an event of the stream. Returns its text. Raises NoAnswer for an error."""
        if (error := event.get("error")) is not None:
            raise NoAnswer(f"the stream ended with {error.get('code')}: {error.get('message')}")
        self.request_id = str(event.get("id", "")).removeprefix("chatcmpl-")
        if usage := event.get("usage"):
            self.tokens = usage["completion_tokens"]
            self.prompt_tokens = usage.get("prompt_tokens", 0)
            self.cached_tokens = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
        text = ""
        for choice in event["choices"]:
            text += choice["delta"].get("content") or ""
            self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if text:
            self.pieces.append(text)
            self.arrived_s.append(now_s)
        return text


def read_events(lines: Iterable[bytes]) -> Iterator[dict[str, Any]]:
    """Yield the events of a stream up to `[DONE]`. Raises NoAnswer if it ends before."""
    for line in lines:
        name, _, data = line.strip().partition(b": ")
        if name != b"data":
            continue
        if data == b"[DONE]":
            return
        yield json.loads(data)
    raise NoAnswer("the stream ended before its last event")


def ask(url: str, body: dict[str, Any], answer: Answer, *, api_key: str = "") -> Iterator[str]:
    """Ask, and yield pieces of text as they arrive; `answer` is filled meanwhile. Raises NoAnswer.

    A caller that stops reading closes the connection, which cancels the request.
    """
    body = {**body, "stream": True, "stream_options": {"include_usage": True}}
    try:
        with closing(_connection(url)) as connection:
            connection.request("POST", "/v1/chat/completions", json.dumps(body), _headers(api_key))
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise NoAnswer(f"the question was answered with {response.status}: {_message(response.read())}")
            answer.worker = json.loads(response.headers.get("x-headrace-decision") or "{}").get("worker", "")
            for event in read_events(iter(response.readline, b"")):
                if text := answer.take(event, time.monotonic()):
                    yield text
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"the connection to {url} broke: {error!r}") from error


def served_models(url: str, *, api_key: str = "") -> list[str]:
    """Return the names of the models that are served. Raises NoAnswer."""
    try:
        with closing(_connection(url)) as connection:
            connection.request("GET", "/v1/models", headers=_headers(api_key))
            response = connection.getresponse()
            told = response.read()
            if response.status != http.client.OK:
                raise NoAnswer(f"{url}/v1/models was answered with {response.status}: {_message(told)}")
            return [str(model["id"]) for model in json.loads(told)["data"]]
    except (OSError, http.client.HTTPException, ValueError, LookupError, TypeError) as error:
        raise NoAnswer(f"{url} does not list its models: {error!r}") from error


def _connection(url: str) -> http.client.HTTPConnection:
    address = urlsplit(url)
    kind = http.client.HTTPSConnection if address.scheme == "https" else http.client.HTTPConnection
    return kind(address.hostname or "", address.port, timeout=_SILENT_S)


def _headers(api_key: str) -> dict[str, str]:
    headers = {"Content-Type": "application/json", "X-Headrace-Explain": "1"}
    return {**headers, "Authorization": f"Bearer {api_key}"} if api_key else headers


def _message(body: bytes) -> str:
    """Return the words of an error in OpenAI's shape, or the whole body."""
    try:
        return str(json.loads(body)["error"]["message"])
    except (ValueError, LookupError, TypeError):
        return body.decode(errors="replace")
