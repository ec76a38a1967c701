"""Downloads of adapters: a web server of our own, S3 by moto's server, and a stand-in for a Hugging Face hub.

The hub's stand-in answers the requests that huggingface_hub makes; no hub can be reached where tests run.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from headrace.workers.adapter_files import downloads
from headrace.workers.adapter_files.archive import pack
from headrace.workers.adapter_files.source import AdapterSource, AllowedSources, parse_source
from headrace.workers.errors import AdapterFilesError
from tests.support.adapter_folders import adapter_folder

MIB = 1024 * 1024
BOTH = ["adapter_config.json", "adapter_model.safetensors"]
ANY_WEB = AllowedSources(["http"])


class Pages(BaseHTTPRequestHandler):
    """Serves `pages`: path → status, headers, body."""

    pages: ClassVar[dict[str, tuple[int, dict[str, str], bytes]]] = {}
    asked: ClassVar[list[str]] = []

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        self.asked.append(f"{self.command} {path}")
        status, headers, body = self.pages.get(path, (404, {}, b"{}"))
        self.send_response(status)
        for name, value in {"Content-Length": str(len(body)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    do_HEAD = do_GET  # noqa: N815  # the name is http.server's

    def log_message(self, *_args: object) -> None:
        """Stay quiet."""


@contextmanager
def serving(pages: dict[str, tuple[int, dict[str, str], bytes]]) -> Iterator[str]:
    Pages.pages, Pages.asked = pages, []
    with ThreadingHTTPServer(("127.0.0.1", 0), Pages) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture
def archive(tmp_path: Path) -> bytes:
    path = tmp_path / "made.tar"
    with path.open("wb") as out:
        pack(adapter_folder(tmp_path / "made"), out)
    return path.read_bytes()


def web(address: str, archive: bytes) -> AdapterSource:
    return parse_source(f"{address}#sha256={hashlib.sha256(archive).hexdigest()}")


def test_an_archive_of_the_named_digest_is_unpacked(tmp_path: Path, archive: bytes) -> None:
    into = tmp_path / "b"
    into.mkdir()
    with serving({"/sql.tar": (200, {}, archive)}) as base:
        downloads.from_web(web(f"{base}/sql.tar?token=x", archive), into, allowed=ANY_WEB, most_bytes=MIB)
    assert sorted(path.name for path in into.iterdir()) == BOTH


@pytest.mark.parametrize(
    ("page", "most", "why"),
    [
        ((200, {}, b"another archive"), MIB, "has the digest"),
        ((404, {}, b""), MIB, "HTTP Error 404"),
        ((200, {}, bytes(100_000)), 50_000, "more than 50000 bytes"),
    ],
)
def test_other_bytes_and_too_many_of_them_are_refused(
    tmp_path: Path, archive: bytes, page: tuple[int, dict[str, str], bytes], most: int, why: str
) -> None:
    with serving({"/sql.tar": page}) as base, pytest.raises(AdapterFilesError, match=why):
        downloads.from_web(web(f"{base}/sql.tar", archive), tmp_path, allowed=ANY_WEB, most_bytes=most)


def test_a_redirect_leads_only_to_where_adapters_may_come_from(tmp_path: Path, archive: bytes) -> None:
    pages: dict[str, tuple[int, dict[str, str], bytes]] = {
        "/open/sql.tar": (302, {"Location": "/open/real.tar"}, b""),
        "/open/real.tar": (200, {}, archive),
        "/open/away.tar": (302, {"Location": "/secret/real.tar"}, b""),
        "/secret/real.tar": (200, {}, archive),
    }
    with serving(pages) as base:
        allowed = AllowedSources([f"{base}/open"])
        downloads.from_web(web(f"{base}/open/sql.tar", archive), tmp_path, allowed=allowed, most_bytes=MIB)
        with pytest.raises(AdapterFilesError, match="not allowed here"):
            downloads.from_web(web(f"{base}/open/away.tar", archive), tmp_path, allowed=allowed, most_bytes=MIB)
        assert "GET /secret/real.tar" not in Pages.asked


# S3


@pytest.fixture(scope="module")
def s3_url() -> Iterator[str]:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        port = found.getsockname()[1]
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 60
        while True:
            with socket.socket() as tried:
                if tried.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < deadline, "moto's server does not answer"
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}"
    finally:
        server.kill()
        server.wait()


@pytest.fixture
def s3(s3_url: str, monkeypatch: pytest.MonkeyPatch) -> AdapterSource:
    for name, value in {
        "AWS_ENDPOINT_URL": s3_url,
        "AWS_ACCESS_KEY_ID": "k",
        "AWS_SECRET_ACCESS_KEY": "s",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    downloads._s3().create_bucket(Bucket="adapters")
    return parse_source("s3://adapters/team/sql")


@pytest.mark.filterwarnings("default")  # botocore's
def test_objects_below_a_prefix_are_read_and_their_tags_name_the_version(tmp_path: Path, s3: AdapterSource) -> None:
    folder = adapter_folder(tmp_path / "a")
    with pytest.raises(AdapterFilesError, match=r"s3://adapters/team/sql/adapter_config\.json cannot be read"):
        downloads.objects_version(parse_source("s3://adapters/team/sql"), most_bytes=MIB)
    for name in BOTH:
        downloads._s3().upload_file(str(folder / name), "adapters", f"team/sql/{name}")
    version = downloads.objects_version(s3, most_bytes=MIB)
    assert downloads.objects_version(s3, most_bytes=MIB) == version
    into = tmp_path / "b"
    into.mkdir()
    downloads.from_objects(s3, version, into)
    assert all((into / name).read_bytes() == (folder / name).read_bytes() for name in BOTH)
    with pytest.raises(AdapterFilesError, match="more than 10"):
        downloads.objects_version(s3, most_bytes=10)
    downloads._s3().put_object(Bucket="adapters", Key=f"team/sql/{BOTH[0]}", Body=b"{}")
    assert downloads.objects_version(s3, most_bytes=MIB) != version
    with pytest.raises(AdapterFilesError, match="cannot be read"):
        downloads.from_objects(s3, version, into)  # replaced in between


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(AdapterFilesError, match=r"headrace\[s3\]"):
        downloads.objects_version(parse_source("s3://bucket/sql"), most_bytes=MIB)


# a hub

COMMIT = "5" * 40
ASK = """
import sys
from pathlib import Path
from headrace.workers.adapter_files import downloads
from headrace.workers.adapter_files.source import parse_source
source = parse_source(sys.argv[1])
try:
    commit = downloads.hub_version(source, most_bytes=int(sys.argv[3]))
    downloads.from_hub(source, commit, Path(sys.argv[2]))
except downloads.AdapterFilesError as error:
    sys.exit(f"refused: {error}")
print(commit)
"""


def hub(folder: Path, *, names: list[str] = BOTH) -> dict[str, tuple[int, dict[str, str], bytes]]:
    siblings = [{"rfilename": name, "size": (folder / name).stat().st_size} for name in names]
    about = json.dumps({"_id": "1", "id": "org/sql", "sha": COMMIT, "siblings": siblings}).encode()
    kind = {"Content-Type": "application/json"}
    pages = {"/api/models/org/sql": (200, kind, about), "/api/models/org/sql/revision/v1": (200, kind, about)}
    for name in names:
        body = (folder / name).read_bytes()
        tags = {"X-Repo-Commit": COMMIT, "ETag": f'"{hashlib.sha256(body).hexdigest()}"'}
        pages[f"/org/sql/resolve/{COMMIT}/{name}"] = (200, tags, body)
    return pages


def ask(base: str, source: str, into: Path, tmp_path: Path, most: int = MIB) -> subprocess.CompletedProcess[str]:
    """Ask in a process of its own: huggingface_hub reads its hub's address when it is imported."""
    environ = {**os.environ, "HF_ENDPOINT": base, "HF_HOME": str(tmp_path / "hf"), "HF_HUB_DISABLE_XET": "1"}
    environ.pop("HF_HUB_OFFLINE", None)
    command = [sys.executable, "-c", ASK, source, str(into), str(most)]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.skipif(importlib.util.find_spec("huggingface_hub") is None, reason="comes with the engines")
def test_a_repository_is_read_at_the_commit_of_its_revision(tmp_path: Path) -> None:
    folder, into = adapter_folder(tmp_path / "a"), tmp_path / "b"
    into.mkdir()
    with serving(hub(folder)) as base:
        for source in ("hf://org/sql", "hf://org/sql@v1"):
            done = ask(base, source, into, tmp_path)
            assert done.stdout.strip() == COMMIT, done.stderr
        assert all((into / name).read_bytes() == (folder / name).read_bytes() for name in BOTH)
        assert "more than 10" in ask(base, "hf://org/sql", into, tmp_path, most=10).stderr
        assert "refused: the hub does not give org/other" in ask(base, "hf://org/other", into, tmp_path).stderr
    with serving(hub(folder, names=BOTH[:1])) as base:
        assert "has no adapter_model.safetensors" in ask(base, "hf://org/sql", into, tmp_path).stderr


def test_without_the_hub_s_package_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(AdapterFilesError, match="needs the package huggingface_hub"):
        downloads.hub_version(parse_source("hf://org/sql"), most_bytes=MIB)
