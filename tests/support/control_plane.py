"""A control plane of Kubernetes on loopback: etcd, kube-apiserver, and kube-controller-manager where there is one.

`KUBEBUILDER_ASSETS` names the folder with these programs, as for envtest. No machine belongs to it: objects are admitted,
stored and controlled as in any cluster, and a pod runs only as far as a test says.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import socket
import ssl
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import httpx
import pytest

from tests.support.certificates import write_certificate

Object = dict[str, Any]
T = TypeVar("T")

_FOLDER = Path(os.environ.get("KUBEBUILDER_ASSETS", "/nonexistent"))
START_S = 90.0
STOP_S = 20.0
MANAGER = "kube-controller-manager"


def _missing(*programs: str) -> str:
    """Return which of these programs are not there."""
    return ", ".join(name for name in programs if not os.access(_FOLDER / name, os.X_OK))


needs_control_plane = pytest.mark.skipif(
    bool(_missing("etcd", "kube-apiserver")),
    reason="KUBEBUILDER_ASSETS names no folder with etcd and kube-apiserver",
)
needs_controllers = pytest.mark.skipif(bool(_missing(MANAGER)), reason=f"KUBEBUILDER_ASSETS has no {MANAGER}")


class Refused(Exception):
    """The API server has refused. `status` has its code."""

    def __init__(self, answer: httpx.Response) -> None:
        super().__init__(f"{answer.status_code} {answer.text[:2000]}")
        self.status = answer.status_code


class ControlPlane:
    """The running programs, and their API as its administrator sees it."""

    def __init__(self, folder: Path) -> None:
        """Start them, and keep what they store and log in a folder. Raises AssertionError, with the end of a log."""
        self.folder = folder
        self.certificate, self._key = write_certificate(folder, name="control-plane")
        self._token = secrets.token_hex(16)
        self.port = _free_port()
        self._running = contextlib.ExitStack()
        tls = ssl.create_default_context(cafile=str(self.certificate))
        self._http = httpx.Client(base_url=f"https://127.0.0.1:{self.port}", verify=tls, trust_env=False, timeout=30.0)
        self._running.callback(self._http.close)
        self._plurals: dict[tuple[str, str], tuple[str, bool]] = {}
        try:
            self._start()
        except BaseException:
            self._running.close()
            raise

    def __enter__(self) -> ControlPlane:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._running.close()

    # -- the API ----------------------------------------------------------------------------------------------------------

    def ask(self, verb: str, path: str, body: Object | None = None, *, content: str = "application/json") -> Object:
        """Ask as the administrator. Raises Refused."""
        return self._asked(verb, path, body, content)[0]

    def apply(self, thing: Object, namespace: str, *, manager: str = "helm") -> list[str]:
        """Apply an object on the server, where an unknown field is a fault, and return its warnings. Raises Refused."""
        plural, namespaced = self._plural(thing["apiVersion"], thing["kind"])
        within = f"/namespaces/{namespace}" if namespaced else ""
        path = f"{_root(thing['apiVersion'])}{within}/{plural}/{thing['metadata']['name']}"
        query = f"?fieldManager={manager}&fieldValidation=Strict"
        return self._asked("PATCH", path + query, thing, "application/apply-patch+yaml")[1]

    def account(self, name: str, namespace: str, folder: Path, *, lasts_s: int = 3600) -> Path:
        """Write a token of a service account into a folder, as Kubernetes mounts it in a pod, and return the folder."""
        folder.mkdir(exist_ok=True)
        request = {"apiVersion": "authentication.k8s.io/v1", "kind": "TokenRequest", "spec": {"expirationSeconds": lasts_s}}
        given = self.ask("POST", f"/api/v1/namespaces/{namespace}/serviceaccounts/{name}/token", request)
        (folder / "token").write_text(given["status"]["token"])
        (folder / "namespace").write_text(namespace)
        shutil.copyfile(self.certificate, folder / "ca.crt")
        return folder

    def _asked(self, verb: str, path: str, body: Object | None, content: str) -> tuple[Object, list[str]]:
        headers = {"Authorization": f"Bearer {self._token}", "Content-Type": content}
        answer = self._http.request(verb, path, content=None if body is None else json.dumps(body), headers=headers)
        if answer.is_error:
            raise Refused(answer)
        return answer.json(), answer.headers.get_list("warning")

    def _plural(self, version: str, kind: str) -> tuple[str, bool]:
        if (version, kind) not in self._plurals:
            for one in self.ask("GET", _root(version))["resources"]:
                if "/" not in one["name"]:
                    self._plurals[version, one["kind"]] = one["name"], one["namespaced"]
        return self._plurals[version, kind]

    # -- the programs -----------------------------------------------------------------------------------------------------

    def _start(self) -> None:
        store, peers = (f"http://127.0.0.1:{_free_port()}" for _ in range(2))
        self._run(
            "etcd",
            f"--data-dir={self.folder / 'etcd'}",
            f"--listen-client-urls={store}",
            f"--advertise-client-urls={store}",
            f"--listen-peer-urls={peers}",
            f"--initial-advertise-peer-urls={peers}",
            f"--initial-cluster=default={peers}",
            "--unsafe-no-fsync",
        )
        tokens = self.folder / "tokens.csv"
        tokens.write_text(f"{self._token},administrator,administrator,system:masters\n")
        server = self._run(
            "kube-apiserver",
            f"--etcd-servers={store}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            f"--secure-port={self.port}",
            f"--cert-dir={self.folder}",
            f"--tls-cert-file={self.certificate}",
            f"--tls-private-key-file={self._key}",
            f"--token-auth-file={tokens}",
            "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self.certificate}",
            f"--service-account-signing-key-file={self._key}",
            "--service-cluster-ip-range=10.0.0.0/24",
        )
        end_s = time.monotonic() + START_S
        while not self._is_ready():
            fine = server.poll() is None and time.monotonic() < end_s
            assert fine, self._log("kube-apiserver").read_text(errors="replace")[-2000:]
            time.sleep(0.1)
        if not _missing(MANAGER):
            self._run(
                MANAGER,
                f"--kubeconfig={self._kubeconfig()}",
                "--leader-elect=false",
                "--secure-port=0",
                f"--root-ca-file={self.certificate}",
                f"--service-account-private-key-file={self._key}",
            )

    def _run(self, program: str, *arguments: str) -> subprocess.Popen[bytes]:
        log = self._running.enter_context(self._log(program).open("wb"))
        process = subprocess.Popen([_FOLDER / program, *arguments], stdout=log, stderr=subprocess.STDOUT, cwd=self.folder)
        self._running.callback(_stop, process)
        return process

    def _log(self, program: str) -> Path:
        return self.folder / f"{program}.log"

    def _is_ready(self) -> bool:
        try:
            return self._http.get("/readyz", headers={"Authorization": f"Bearer {self._token}"}).is_success
        except httpx.TransportError:
            return False

    def _kubeconfig(self) -> Path:
        cluster = {"server": f"https://127.0.0.1:{self.port}", "certificate-authority": str(self.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "here", "cluster": cluster}],
            "users": [{"name": "administrator", "user": {"token": self._token}}],
            "contexts": [{"name": "here", "context": {"cluster": "here", "user": "administrator"}}],
            "current-context": "here",
        }
        path = self.folder / "kubeconfig.json"
        path.write_text(json.dumps(config))
        return path


def until(what: str, holds: Callable[[], T], *, within_s: float = 30.0) -> T:
    """Wait until something holds and return it. Raises TimeoutError."""
    end_s = time.monotonic() + within_s
    while not (found := holds()):
        if time.monotonic() > end_s:
            raise TimeoutError(f"not within {within_s:.0f} s: {what}")
        time.sleep(0.05)
    return found


def _root(version: str) -> str:
    return f"/apis/{version}" if "/" in version else f"/api/{version}"


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port: int = free.getsockname()[1]
        return port


def _stop(process: subprocess.Popen[bytes]) -> None:
    process.terminate()
    try:
        process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait(STOP_S)
