"""A fake of the Kubernetes API over real HTTPS: Deployments, scales and pods, with versions, rights, delays and lost answers.

It is a fake: what it checks of a request (verb, path, content type, token, version) is what the API's documentation says.
"""

from __future__ import annotations

import datetime as dt
import ipaddress
import json
import ssl
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, unquote, urlsplit

from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec

Object = dict[str, Any]
NAMESPACE = "llm"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"


class FakeCluster:
    """The objects of a namespace, and what was asked of it."""

    def __init__(self) -> None:
        self.token = "token-1"
        self.asked: list[tuple[str, str, Any]] = []  # verb, path, body
        self.replicas: dict[str, int] = {}  # by name of a Deployment
        self.annotations: dict[str, dict[str, str]] = {}
        self.roles: dict[str, str] = {}
        self.pods: dict[str, Object] = {}
        self.version = 7
        self.refuse: Callable[[str, str], tuple[int, Object] | None] = lambda _verb, _path: None
        self.before_answer: Callable[[str, str], None] = lambda _verb, _path: None  # after a change was made
        self.before_change: Callable[[], None] = lambda: None
        self.raw: bytes | None = None  # sent instead of an answer

    def deployment(self, name: str, *, pool: str, role: str, replicas: int, **bounds: int) -> None:
        """Add a Deployment whose pods run."""
        told = {"plan.headrace/pool": pool, **{f"plan.headrace/{key}": str(value) for key, value in bounds.items()}}
        self.annotations[name], self.roles[name], self.replicas[name] = told, role, replicas
        for number in range(replicas):
            self.pod(f"{name}-{number}", of=name)

    def pod(self, name: str, *, of: str, ending: bool = False, phase: str = "Running") -> None:
        """Add a pod."""
        meta: Object = {"name": name, "labels": {"app": of}, "annotations": {}}
        if ending:
            meta["deletionTimestamp"] = "2026-01-01T00:00:00Z"
        self.pods[name] = {"metadata": meta, "status": {"phase": phase}}

    def costs(self) -> dict[str, str]:
        """Return the deletion costs that pods have."""
        found = {name: one["metadata"]["annotations"].get(DELETION_COST) for name, one in self.pods.items()}
        return {name: cost for name, cost in found.items() if cost is not None}

    def changes(self) -> list[tuple[str, str]]:
        """Return the changes that were asked for: what, and its path's end."""
        return [(verb, path.partition(f"/{NAMESPACE}/")[2]) for verb, path, _ in self.asked if verb == "PATCH"]

    def answer(self, verb: str, target: str, body: Object | None) -> tuple[int, Object]:
        """Answer a request."""
        path, query = unquote(urlsplit(target).path), parse_qs(urlsplit(target).query)
        selector = dict(part.split("=", 1) for part in query.get("labelSelector", [""])[0].split(",") if part)
        refused = self.refuse(verb, path)
        if refused is not None:
            return refused
        base, pods = f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments", f"/api/v1/namespaces/{NAMESPACE}/pods"
        if verb == "GET" and path == base:
            names = [name for name, role in self.roles.items() if selector.get("plan.headrace/role") == role]
            return 200, {"kind": "DeploymentList", "items": [self._meta(name) for name in names]}
        if verb == "GET" and path == pods:
            return 200, {"items": [one for one in self.pods.values() if one["metadata"]["labels"]["app"] == selector["app"]]}
        if verb == "PATCH" and path.startswith(f"{pods}/"):
            return self._cost(path.rpartition("/")[2], body or {})
        name, _, rest = path.removeprefix(f"{base}/").partition("/")
        if path.startswith(f"{base}/") and rest == "scale" and name in self.replicas:
            return self._scaled(name, verb, body)
        return 404, {"kind": "Status", "message": f"{path} not found", "code": 404}

    def _meta(self, name: str) -> Object:
        return {"metadata": {"name": name, "annotations": self.annotations[name], "resourceVersion": str(self.version)}}

    def _scaled(self, name: str, verb: str, body: Object | None) -> tuple[int, Object]:
        if verb == "PATCH":
            self.before_change()
            assert body is not None
            if body["metadata"]["resourceVersion"] != str(self.version):
                return 409, {"kind": "Status", "message": "the object has been modified", "code": 409}
            self.replicas[name] = body["spec"]["replicas"]
            self.version += 1
        scale = {**self._meta(name), "spec": {"replicas": self.replicas[name]}}
        return 200, {**scale, "status": {"replicas": self.replicas[name], "selector": f"app={name}"}}

    def _cost(self, name: str, body: Object) -> tuple[int, Object]:
        if name not in self.pods:
            return 404, {"kind": "Status", "message": f"pods {name!r} not found", "code": 404}
        annotations = self.pods[name]["metadata"]["annotations"]
        for key, value in body["metadata"]["annotations"].items():
            annotations.pop(key, None) if value is None else annotations.__setitem__(key, value)
        return 200, self.pods[name]


@contextmanager
def served(cluster: FakeCluster, folder: Path) -> Iterator[int]:
    """Serve a cluster over TLS, write its service account into a folder, and give the port."""
    certificate, key = _certificate(folder)
    (folder / "token").write_text(cluster.token + "\n")
    (folder / "namespace").write_text(NAMESPACE)

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            length = int(self.headers.get("content-length", 0))
            body = json.loads(self.rfile.read(length)) if length else None
            verb, path = self.command, self.path
            cluster.asked.append((verb, path, body))
            if self.headers.get("authorization") != f"Bearer {cluster.token}":
                status, answer = 401, {"kind": "Status", "message": "Unauthorized", "code": 401}
            elif verb == "PATCH" and self.headers.get("content-type") != "application/merge-patch+json":
                status, answer = 415, {"kind": "Status", "message": "the body is of no known type", "code": 415}
            else:
                status, answer = cluster.answer(verb, path, body)
            cluster.before_answer(verb, path)
            data = cluster.raw if cluster.raw is not None else json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("content-length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_PATCH = do_PUT = do_POST = do_DELETE = _any  # noqa: N815

        def log_message(self, *_arguments: Any) -> None:
            pass

        def handle(self) -> None:
            with suppress(OSError):  # the asker has left
                super().handle()

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    tls.load_cert_chain(certificate, key)
    server.socket = tls.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def _certificate(folder: Path) -> tuple[Path, Path]:
    """Write a certificate that vouches for itself, as `ca.crt` and for the server."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "fake")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    (folder / "ca.crt").write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    private = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(serialization.Encoding.PEM, *private))
    return folder / "ca.crt", folder / "key.pem"
