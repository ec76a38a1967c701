"""Asks the Kubernetes API over HTTPS with the token of a service account, one request for each connection.

Two verbs are enough, GET and PATCH, so the standard library's client does, in a thread. Tokens are read for each request,
because Kubernetes replaces them while the process runs. Nothing but HTTPS is spoken, and only to a server that the given CA
vouches for.
"""

from __future__ import annotations

import asyncio
import http.client
import os
import ssl
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.planner.kubernetes.errors import (
    AccessDenied,
    AnswerUnreadable,
    ApiRefused,
    ApiUnreachable,
    ChangedMeanwhile,
    ObjectMissing,
    OutcomeUnknown,
)

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts it
TIMEOUT_S = 10.0
MOST_BYTES = 32 * 1024 * 1024
MERGE = "application/merge-patch+json"
_CHUNK = 64 * 1024
_KINDS: dict[int, type[ApiRefused]] = {401: AccessDenied, 403: AccessDenied, 404: ObjectMissing, 409: ChangedMeanwhile}


class KubernetesApi:
    """The API as one service account sees it. Raises the KubernetesError family."""

    def __init__(self, host: str, port: int, *, account: Path = ACCOUNT, timeout_s: float = TIMEOUT_S) -> None:
        """`account`: the folder with `token`, `ca.crt` and `namespace`. Raises OSError for one that has none."""
        self._host, self._port = host, port
        self._token_file = account / "token"
        self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        self._timeout_s = timeout_s
        self.namespace = (account / "namespace").read_text().strip()
        self._token_file.read_text()

    @classmethod
    def of_this_pod(cls, env: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> KubernetesApi:
        """Return the API of the cluster that this process runs in. Raises ApiUnreachable outside of one."""
        host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if not host:
            raise ApiUnreachable("this process runs in no cluster: KUBERNETES_SERVICE_HOST is not set")
        try:
            return cls(host, int(port), account=account)
        except (OSError, ValueError) as error:
            raise ApiUnreachable(f"the service account in {account} cannot be used: {error}") from error

    async def get(self, path: str) -> dict[str, Any]:
        """Return an object or a list."""
        return await asyncio.to_thread(self._ask, "GET", path, None)

    async def patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a change into an object and return it. With a `resourceVersion` only that version is changed."""
        return await asyncio.to_thread(self._ask, "PATCH", path, msgspec.json.encode(change))

    def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Accept": "application/json", "Authorization": f"Bearer {self._token_file.read_text().strip()}"}
        if body is not None:
            headers["Content-Type"] = MERGE
        until_s = time.monotonic() + self._timeout_s
        connection = http.client.HTTPSConnection(self._host, self._port, timeout=self._timeout_s, context=self._tls)
        try:
            try:
                connection.connect()
            except OSError as error:
                raise ApiUnreachable(f"{self._host}:{self._port} cannot be reached: {error}") from error
            try:
                connection.request(method, path, body, headers)
                with connection.getresponse() as answer:
                    data = _read(answer, until_s)
            except (OSError, http.client.HTTPException) as error:
                kind = ApiUnreachable if body is None else OutcomeUnknown
                raise kind(f"{method} {path} had no answer: {type(error).__name__} {error}") from error
        finally:
            connection.close()
        return _answer(method, path, answer.status, data)


def _read(answer: http.client.HTTPResponse, until_s: float) -> bytes:
    """Read a body of bounded size in bounded time. Raises OSError and HTTPException."""
    parts, size = [], 0
    while part := answer.read1(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > MOST_BYTES:
            raise OSError(f"more than {MOST_BYTES} bytes")
        if time.monotonic() > until_s:
            raise TimeoutError("timed out")
    if answer.length:  # of what the headers promised
        raise http.client.IncompleteRead(b"".join(parts), answer.length)
    return b"".join(parts)


def _answer(method: str, path: str, status: int, data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        if status < 300:
            raise AnswerUnreadable(f"{method} {path} answered {status} with no object: {error}") from error
        body = {}
    if status < 300:
        return body
    why = str(body.get("message") or body.get("reason") or "no reason given")[:300]
    raise _KINDS.get(status, ApiRefused)(f"{method} {path} answered {status}: {why}", status=status)
