"""A proxy in front of a deployment that keeps what a program asks, and makes samples of it."""

from __future__ import annotations

import contextlib
import http.client
import json
import re
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

ANSWER_S = 120
HOP = {"connection", "content-length", "host", "keep-alive", "transfer-encoding"}


@dataclass
class Asked:
    method: str
    path: str
    headers: dict[str, str]
    body: Any
    status: int = 0
    answer: bytes = b""
    ended: bool = False


@dataclass
class Recorder:
    url: str
    requests: list[Asked] = field(default_factory=list)


@contextlib.contextmanager
def recording(target: str) -> Iterator[Recorder]:
    """Forward what comes to `target`, byte for byte and as it comes."""
    address = urlsplit(target).netloc

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def forward(self) -> None:
            sent = self.rfile.read(int(self.headers.get("content-length", 0)))
            headers = {name.lower(): value for name, value in self.headers.items() if name.lower() not in HOP}
            asked = Asked(self.command, self.path, headers, json.loads(sent) if sent else None)
            recorder.requests.append(asked)
            upstream = http.client.HTTPConnection(address, timeout=ANSWER_S)
            try:
                upstream.request(self.command, self.path, sent or None, headers)
                answer = upstream.getresponse()
                asked.status = answer.status
                self.send_response(answer.status)
                for name, value in answer.getheaders():
                    if name.lower() not in HOP:
                        self.send_header(name, value)
                self.send_header("connection", "close")
                self.close_connection = True
                self.end_headers()
                while piece := answer.read1(65536):
                    asked.answer += piece
                    self.wfile.write(piece)
                asked.ended = True
            finally:
                upstream.close()

        do_GET = do_HEAD = do_POST = do_DELETE = forward  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    recorder = Recorder(f"http://127.0.0.1:{server.server_address[1]}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield recorder
    finally:
        server.shutdown()
        server.server_close()


ID = re.compile(r"\b(call|fco?|msg|rs|ses)_[\w-]{8,}|[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\b[0-9a-f]{32,}\b")
PLAIN = re.compile(r"(?!.*/(tmp|home|root)/)[\w.,:;/#$+*=?&-]{0,60}|\w+( \w+)?")
MACHINE = re.compile(r"\(.*\)")


def samples(requests: Iterable[Asked]) -> list[dict[str, Any]]:
    """Return requests of each shape, the last one of a shape, which has most in it. What describes the user, the machine or the
    session is replaced, and so is every longer text: the names of fields and the words that mean something stay."""
    ids: dict[str, str] = {}

    def numbered(found: re.Match[str]) -> str:
        return ids.setdefault(found[0], f"id-{len(ids) + 1}")

    def scrubbed(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: scrubbed(one) for key, one in value.items()}
        if isinstance(value, list):
            return [scrubbed(one) for one in value]
        if isinstance(value, str):
            if value.startswith("{"):
                with contextlib.suppress(ValueError):
                    return json.dumps(scrubbed(json.loads(value)), ensure_ascii=False)
            value = ID.sub(numbered, value)
            return value if PLAIN.fullmatch(value) else "…"
        return 0 if isinstance(value, int) and value > 1_000_000_000_000 and value < 2**53 - 1 else value

    def header(value: str) -> str:
        return str(scrubbed(value)) if value.startswith("{") else MACHINE.sub("…", ID.sub(numbered, value))

    shapes = {(asked.path, *sorted(asked.body)): asked for asked in requests if asked.body}
    return [
        {
            "path": asked.path,
            "headers": {name: header(value) for name, value in asked.headers.items()},
            "body": scrubbed(asked.body),
        }
        for asked in shapes.values()
    ]


def written(found: list[dict[str, Any]]) -> str:
    """Return samples as JSON with a line for each header, and for each field or item of a field in a body."""

    def field(value: Any) -> str:
        if isinstance(value, list):
            return "[\n" + ",\n".join(f"   {json.dumps(item, ensure_ascii=False)}" for item in value) + "\n  ]"
        return json.dumps(value, ensure_ascii=False)

    def request(sample: dict[str, Any]) -> str:
        body = ",\n".join(f"  {json.dumps(key)}: {field(value)}" for key, value in sample["body"].items())
        headers = json.dumps(sample["headers"], indent=2, ensure_ascii=False).replace("\n}", "\n }")
        return f'{{\n "path": {json.dumps(sample["path"])},\n "headers": {headers},\n "body": {{\n{body}\n }}\n}}'

    return "[" + ",".join(map(request, found)) + "]\n"
