"""Archives of adapters: the two files and nothing else come out, within a limit."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import json
import os
import socket
import subprocess
import sys
import tarfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import ClassVar

import pytest

from headrace.workers import adapter_files
from headrace.workers.adapter_cache import AdapterCache
from headrace.workers.adapter_files import AdapterFiles, AdapterLimits, open_engine_adapters, pack, unpack
from headrace.workers.adapter_source import AdapterSource, AllowedSources, parse_source
from headrace.workers.errors import AdapterFilesError, EngineStartFailed
from tests.support.adapter_folders import adapter_folder
from tests.support.memory_store import MemoryClock, MemoryObjects

BOTH = ["adapter_config.json", "adapter_model.safetensors"]
MIB = 1024 * 1024


def archive(tmp_path: Path, *entries: tuple[str, bytes | tarfile.TarInfo], mode: str = "w") -> Path:
    path = tmp_path / "made.tar"
    with tarfile.open(path, mode) as made:  # type: ignore[call-overload]
        for name, content in entries:
            if isinstance(content, tarfile.TarInfo):
                made.addfile(content)
                continue
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    return path


def link(name: str, target: str) -> tuple[str, tarfile.TarInfo]:
    entry = tarfile.TarInfo(name)
    entry.type, entry.linkname = tarfile.SYMTYPE, target
    return name, entry


def refused(path: Path, into: Path, *, most_bytes: int = MIB) -> str:
    into.mkdir(exist_ok=True)
    with pytest.raises(AdapterFilesError) as told:
        unpack(path, into, most_bytes=most_bytes)
    return str(told.value)


def test_what_was_packed_comes_out_and_the_same_files_give_the_same_bytes(tmp_path: Path) -> None:
    folder = adapter_folder(tmp_path / "a")
    made = []
    for number in range(2):
        (folder / BOTH[0]).touch()  # another time
        path = tmp_path / f"{number}.tar"
        with path.open("wb") as out:
            pack(folder, out)
        made.append(path.read_bytes())
    assert made[0] == made[1]
    into = tmp_path / "b"
    into.mkdir()
    unpack(tmp_path / "0.tar", into, most_bytes=MIB)
    assert sorted(path.name for path in into.iterdir()) == BOTH
    assert all((into / name).read_bytes() == (folder / name).read_bytes() for name in BOTH)


@pytest.mark.parametrize("mode", ["w:gz", "w:bz2", "w:xz"])
def test_compressed_archives_with_a_folder_in_them_are_read(tmp_path: Path, mode: str) -> None:
    path = archive(tmp_path, ("sql/README.md", b"x"), *((f"sql/{name}", b"{}") for name in BOTH), mode=mode)
    into = tmp_path / "b"
    into.mkdir()
    unpack(path, into, most_bytes=MIB)
    assert sorted(found.name for found in into.iterdir()) == BOTH


def test_other_files_stay_in_the_archive_wherever_they_would_go(tmp_path: Path) -> None:
    escape = ("../../escaped", b"x")
    path = archive(tmp_path, escape, link("aside", "/etc/passwd"), *((f"../{name}", b"{}") for name in BOTH))
    into = tmp_path / "in" / "b"
    into.mkdir(parents=True)
    unpack(path, into, most_bytes=MIB)
    assert sorted(str(found.relative_to(tmp_path)) for found in tmp_path.rglob("*") if found.is_file()) == sorted(
        ["made.tar", *(f"in/b/{name}" for name in BOTH)]
    )


def test_a_link_in_the_place_of_a_file_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, link(BOTH[0], "/etc/passwd"), (BOTH[1], b"{}"))
    assert "not as a plain file" in refused(path, tmp_path / "b")


def test_a_file_twice_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, (BOTH[0], b"{}"), (f"again/{BOTH[0]}", b"{}"))
    assert "twice" in refused(path, tmp_path / "b")


def test_a_small_archive_of_very_much_is_refused(tmp_path: Path) -> None:
    path = archive(tmp_path, ("padding", bytes(8 * MIB)), (BOTH[0], b"{}"), (BOTH[1], b"{}"), mode="w:gz")
    assert path.stat().st_size < MIB
    assert f"more than {MIB} bytes" in refused(path, tmp_path / "b")


def test_what_is_no_archive_or_lacks_a_file_is_refused(tmp_path: Path) -> None:
    assert "has no adapter_model.safetensors" in refused(archive(tmp_path, (BOTH[0], b"{}")), tmp_path / "b")
    plain = tmp_path / "plain"
    plain.write_bytes(b"no archive")
    assert "cannot be read" in refused(plain, tmp_path / "b")
    cut = tmp_path / "cut"
    cut.write_bytes(archive(tmp_path, (BOTH[0], b"{}"), (BOTH[1], bytes(MIB // 2))).read_bytes()[:2000])
    assert "cannot be read" in refused(cut, tmp_path / "c")


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
def downloads_archive(tmp_path: Path) -> bytes:
    path = tmp_path / "made.tar"
    with path.open("wb") as out:
        pack(adapter_folder(tmp_path / "made"), out)
    return path.read_bytes()


def web(address: str, downloads_archive: bytes) -> AdapterSource:
    return parse_source(f"{address}#sha256={hashlib.sha256(downloads_archive).hexdigest()}")


def test_an_archive_of_the_named_digest_is_unpacked(tmp_path: Path, downloads_archive: bytes) -> None:
    into = tmp_path / "b"
    into.mkdir()
    with serving({"/sql.tar": (200, {}, downloads_archive)}) as base:
        adapter_files.from_web(web(f"{base}/sql.tar?token=x", downloads_archive), into, allowed=ANY_WEB, most_bytes=MIB)
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
    tmp_path: Path, downloads_archive: bytes, page: tuple[int, dict[str, str], bytes], most: int, why: str
) -> None:
    with serving({"/sql.tar": page}) as base, pytest.raises(AdapterFilesError, match=why):
        adapter_files.from_web(web(f"{base}/sql.tar", downloads_archive), tmp_path, allowed=ANY_WEB, most_bytes=most)


def test_a_redirect_leads_only_to_where_adapters_may_come_from(tmp_path: Path, downloads_archive: bytes) -> None:
    pages: dict[str, tuple[int, dict[str, str], bytes]] = {
        "/open/sql.tar": (302, {"Location": "/open/real.tar"}, b""),
        "/open/real.tar": (200, {}, downloads_archive),
        "/open/away.tar": (302, {"Location": "/secret/real.tar"}, b""),
        "/secret/real.tar": (200, {}, downloads_archive),
    }
    with serving(pages) as base:
        allowed = AllowedSources([f"{base}/open"])
        adapter_files.from_web(web(f"{base}/open/sql.tar", downloads_archive), tmp_path, allowed=allowed, most_bytes=MIB)
        with pytest.raises(AdapterFilesError, match="not allowed here"):
            adapter_files.from_web(web(f"{base}/open/away.tar", downloads_archive), tmp_path, allowed=allowed, most_bytes=MIB)
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
    adapter_files._s3().create_bucket(Bucket="adapters")
    return parse_source("s3://adapters/team/sql")


@pytest.mark.filterwarnings("default")  # botocore's
def test_objects_below_a_prefix_are_read_and_their_tags_name_the_version(tmp_path: Path, s3: AdapterSource) -> None:
    folder = adapter_folder(tmp_path / "a")
    with pytest.raises(AdapterFilesError, match=r"s3://adapters/team/sql/adapter_config\.json cannot be read"):
        adapter_files.objects_version(parse_source("s3://adapters/team/sql"), most_bytes=MIB)
    for name in BOTH:
        adapter_files._s3().upload_file(str(folder / name), "adapters", f"team/sql/{name}")
    version = adapter_files.objects_version(s3, most_bytes=MIB)
    assert adapter_files.objects_version(s3, most_bytes=MIB) == version
    into = tmp_path / "b"
    into.mkdir()
    adapter_files.from_objects(s3, version, into)
    assert all((into / name).read_bytes() == (folder / name).read_bytes() for name in BOTH)
    with pytest.raises(AdapterFilesError, match="more than 10"):
        adapter_files.objects_version(s3, most_bytes=10)
    adapter_files._s3().put_object(Bucket="adapters", Key=f"team/sql/{BOTH[0]}", Body=b"{}")
    assert adapter_files.objects_version(s3, most_bytes=MIB) != version
    with pytest.raises(AdapterFilesError, match="cannot be read"):
        adapter_files.from_objects(s3, version, into)  # replaced in between


def test_without_boto3_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "boto3", None)
    with pytest.raises(AdapterFilesError, match=r"headrace\[s3\]"):
        adapter_files.objects_version(parse_source("s3://bucket/sql"), most_bytes=MIB)


# a hub

COMMIT = "5" * 40
ASK = """
import sys
from pathlib import Path
from headrace.workers import adapter_files as downloads
from headrace.workers.adapter_source import parse_source
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
        adapter_files.hub_version(parse_source("hf://org/sql"), most_bytes=MIB)


class Bench:
    """Files over a store in memory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.store = MemoryObjects(MemoryClock())
        self.cache = AdapterCache(folder / "cache", most_bytes=MIB)

    def files(self, *rules: str, most_bytes: int = MIB) -> AdapterFiles:
        limits = AdapterLimits(allowed=AllowedSources(rules or ("folder", "store")), most_bytes=most_bytes, timeout_s=10)
        return AdapterFiles(limits, self.cache, self.store)

    async def push(self, name: str, **files: bytes) -> None:
        path = self.folder / "pushed.tar"
        with path.open("wb") as out:
            pack(adapter_folder(self.folder / "pushed", **files), out)
        await self.store.put(name, path.read_bytes())


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    return Bench(tmp_path)


async def files_refused(files: AdapterFiles, source: str) -> str:
    with pytest.raises(AdapterFilesError) as told:
        await files.open(source)
    return str(told.value)


async def test_a_path_that_no_folder_can_have_is_refused(bench: Bench) -> None:
    assert "is no path of a folder" in await files_refused(bench.files(), "/" + "x" * 5000)


async def test_what_was_pushed_is_a_folder_and_the_same_one_the_next_time(bench: Bench) -> None:
    await bench.push("sql")
    first, again = await bench.files().open("store://sql"), await bench.files().open("store://sql")
    assert first.path == again.path
    assert sorted(path.name for path in first.path.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
    await bench.push("sql", config=b'{"peft_type": "LORA", "r": 4}')
    replaced = await bench.files().open("store://sql")
    assert replaced.path != first.path
    for opened in (first, again, replaced):
        opened.close()


async def test_what_was_pushed_by_another_tool_is_checked_before_an_engine_sees_it(bench: Bench) -> None:
    await bench.push("sql", weights=b"\x80\x04]\x94.")
    assert "is no safetensors file" in await files_refused(bench.files(), "store://sql")
    assert not list((bench.folder / "cache").glob("*.part"))
    await bench.store.put("sql", b"no archive")
    assert "the archive cannot be read" in await files_refused(bench.files(), "store://sql")


async def test_limits_and_rules_come_first(bench: Bench) -> None:
    await bench.push("sql")
    assert "more than 100 (worker.adapter_max_bytes)" in await files_refused(bench.files(most_bytes=100), "store://sql")
    assert "allows: folder" in await files_refused(bench.files("folder"), "store://sql")
    assert "store://other cannot be read" in await files_refused(bench.files(), "store://other")


async def test_a_folder_is_taken_where_it_is_and_checked_if_it_has_an_adapter_of_peft(bench: Bench) -> None:
    folder = adapter_folder(bench.folder / "a")
    assert (await bench.files().open(str(folder))).path == folder
    (folder / "adapter_model.bin").write_bytes(b"")
    assert "may hold code" in await files_refused(bench.files(), str(folder))
    assert (await bench.files().open("/of/another/engine")).path == Path("/of/another/engine")


async def test_an_engine_is_started_with_folders_in_place_of_sources(bench: Bench) -> None:
    await bench.push("sql")
    args, folders = await open_engine_adapters(bench.files(), {"adapters": {"sql": "store://sql", "fr": "/models/fr"}, "x": 1})
    assert args == {"adapters": {"sql": str(folders["sql"].path), "fr": "/models/fr"}, "x": 1}
    folders["sql"].close()
    assert await open_engine_adapters(bench.files(), {"adapters": ["sql"]}) == ({"adapters": ["sql"]}, {})
    with pytest.raises(EngineStartFailed, match="adapters: adapters from hf://org/sql are not allowed"):
        await open_engine_adapters(bench.files(), {"adapters": {"sql": "store://sql", "fr": "hf://org/sql"}})
