"""Asks a chat question over HTTP and reads the streamed answer, as any client of OpenAI's API does."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from headrace.errors import CommandError

_SILENT_S = 30.0  # the longest wait for the next piece


class NoAnswer(CommandError):
    """The demo's question was not answered."""


@dataclass(slots=True)
class Answer:
    """An answer as it was read. `arrived_s` has the time of each piece of text, by a monotonic clock."""

    worker: str = ""  # that the router chose
    request_id: str = ""
    pieces: list[str] = field(default_factory=list)
    arrived_s: list[float] = field(default_factory=list)
    finish_reason: str | None = None
    tokens: int = 0  # by its usage

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


def ask(url: str, body: dict[str, Any], answer: Answer) -> Iterator[str]:
    """Ask, and yield pieces of text as they arrive; `answer` is filled meanwhile. Raises NoAnswer."""
    address = urlsplit(url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=_SILENT_S)
    try:
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        headers = {"Content-Type": "application/json", "X-Headrace-Explain": "1"}
        connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
        response = connection.getresponse()
        if response.status != http.client.OK:
            raise NoAnswer(f"the question was answered with {response.status}: {response.read().decode(errors='replace')}")
        answer.worker = json.loads(response.headers.get("x-headrace-decision") or "{}").get("worker", "")
        for event in read_events(iter(response.readline, b"")):
            if text := answer.take(event, time.monotonic()):
                yield text
    except (OSError, http.client.HTTPException) as error:
        raise NoAnswer(f"the connection to {url} broke: {error!r}") from error
    finally:
        connection.close()
