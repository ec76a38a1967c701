"""Serves `/live`, `/ready`, `/health` and `/metrics` of a worker or router to orchestrators, from threads of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from threading import Thread
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

import msgspec
from prometheus_client import make_wsgi_app

from headrace.broker.part_state import Answer, PartState

PATIENCE_S = 10.0  # a client that sends nothing for so long is let go


class ProbeServer(ThreadingMixIn, WSGIServer):
    """Answers each connection in a thread, so that one slow client does not keep the kubelet waiting."""

    daemon_threads = True


class ProbeHandler(WSGIRequestHandler):
    """Handles a request without a line in the log, and lets go of a client that sends nothing."""

    timeout = PATIENCE_S

    def log_message(self, *_line: Any) -> None:
        """Log nothing: probes come every second."""


def probe_app(state: PartState) -> Callable[..., Iterable[bytes]]:
    """Return the WSGI application."""
    metrics = make_wsgi_app()
    answers: dict[str, Callable[[], Answer]] = {"/live": state.live, "/ready": state.ready, "/health": state.health}

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path = environ.get("PATH_INFO", "")
        if path == "/metrics":
            result: Iterable[bytes] = metrics(environ, start_response)
            return result
        answer = answers.get(path)
        if answer is None:
            found = Answer(False, {"error": f"there are {', '.join([*answers, '/metrics'])}"})
            status = "404 Not Found"
        else:
            found = answer()
            status = "200 OK" if found.ok else "503 Service Unavailable"
        start_response(status, [("content-type", "application/json"), ("cache-control", "no-store")])
        return [msgspec.json.encode(found.body)]

    return app


def serve_probes(host: str, port: int, state: PartState) -> int:
    """Serve in a thread that ends with the process. Returns the port. Raises OSError when the address cannot be used."""
    server = make_server(host, port, probe_app(state), ProbeServer, ProbeHandler)
    Thread(target=server.serve_forever, name="probes", daemon=True).start()
    return int(server.server_port)
