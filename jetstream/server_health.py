"""Reads what a nats-server's monitoring port says about its health."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

_TIMEOUT_S = 1.0
_LEFT_OUT = re.compile(r'Error recreating stream "([^"]+)"')


@dataclass(frozen=True)
class ServerHealth:
    """Health of one nats-server.

    A server with damaged streams serves: it takes clients, and a stream that is created under the name of a damaged one takes
    over the messages that can be read.  Only the server's health stays an error for as long as one of them is missing.
    """

    ok: bool
    damaged: tuple[str, ...] = ()  # streams whose files the server could not read when it started
    problem: str = ""  # any other reason why it is not healthy

    @property
    def serves(self) -> bool:
        return self.ok or (bool(self.damaged) and not self.problem)


def parse_health(status: int, body: Mapping[str, Any]) -> ServerHealth:
    """Return what `/healthz?details=true` said with HTTP code `status`."""
    if status == 200:
        return ServerHealth(ok=True)
    errors = [error for error in body.get("errors") or () if isinstance(error, Mapping)]
    lost = [error for error in errors if error.get("type") == "STREAM" and "could not be recovered" in str(error.get("error"))]
    others = [str(error.get("error")) for error in errors if error not in lost]
    if not errors:
        others.append(str(body.get("error") or f"HTTP {status}"))
    return ServerHealth(
        ok=False, damaged=tuple(sorted(str(error.get("stream")) for error in lost)), problem="; ".join(others[:3])
    )


def streams_left_out(log: Iterable[str]) -> tuple[str, ...]:
    """Return the streams that a server could not make again at its start, by its log: its health says nothing of them."""
    return tuple(sorted({found[1] for line in log if (found := _LEFT_OUT.search(line))}))


def read_health(monitoring_url: str) -> ServerHealth:
    """Ask a server for its health; blocks for up to a second. A server that does not answer is one with a problem."""
    import urllib.error  # while the server starts, so that the start of a command does not wait for it
    import urllib.request

    try:
        with urllib.request.urlopen(f"{monitoring_url}/healthz?details=true", timeout=_TIMEOUT_S) as answer:  # noqa: S310  # own
            return parse_health(answer.status, {})
    except urllib.error.HTTPError as error:
        return parse_health(error.code, _body(error.read()))
    except OSError as error:
        return ServerHealth(ok=False, problem=str(error))


def _body(text: bytes) -> Mapping[str, Any]:
    try:
        body = json.loads(text)
    except ValueError:
        return {}
    return body if isinstance(body, dict) else {}
