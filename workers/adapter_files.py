"""Files of adapters: packed as a tar archive, downloaded from hubs, S3 and web servers, and checked for an engine."""

from __future__ import annotations

import hashlib
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

import structlog

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import ObjectBucket
from headrace.workers.adapter_cache import AdapterCache, AdapterFolder
from headrace.workers.adapter_source import CONFIG, FILES, AdapterSource, AllowedSources, check_adapter_folder, parse_source
from headrace.workers.blocking import run_in_thread
from headrace.workers.errors import AdapterFilesError, EngineStartFailed
from headrace.workers.lora import ADAPTERS_ARG

PIECE = 1024 * 1024  # bytes


def pack(folder: Path, out: IO[bytes]) -> None:
    """Write the archive. The same files give the same bytes, so that pushing them again changes no digest."""
    with tarfile.open(fileobj=out, mode="w", format=tarfile.USTAR_FORMAT) as archive:
        for name in FILES:
            path = folder / name
            entry = tarfile.TarInfo(name)
            entry.size = path.stat().st_size
            entry.mode = 0o600
            with path.open("rb") as file:
                archive.addfile(entry, file)


def unpack(archive: Path, folder: Path, *, most_bytes: int) -> None:
    """Unpack the adapter's files, which may lie in one folder of the archive. Raises AdapterFilesError.

    Read one entry at a time and counted, because a small archive may hold very much.
    """
    found: set[str] = set()
    left = most_bytes
    try:
        with tarfile.open(archive, mode="r:*") as entries:
            for entry in entries:
                if entry.size > left:  # also of what is left out below: it has to be read all the same
                    raise AdapterFilesError(f"the archive holds more than {most_bytes} bytes (worker.adapter_max_bytes)")
                left -= entry.size
                name = entry.name.rpartition("/")[2]
                if name not in FILES:
                    continue
                if not entry.isreg() or name in found:
                    raise AdapterFilesError(f"the archive has {entry.name!r} twice, or not as a plain file")
                file = entries.extractfile(entry)
                assert file is not None  # noqa: S101  # of a regular file
                with (folder / name).open("wb") as out:
                    for piece in _pieces(file):
                        out.write(piece)
                found.add(name)
                if len(found) == len(FILES):
                    return
    except (tarfile.TarError, EOFError, OSError) as error:
        raise AdapterFilesError(f"the archive cannot be read: {error}") from None
    missing = ", ".join(name for name in FILES if name not in found)
    raise AdapterFilesError(f"the archive has no {missing}")


def _pieces(file: IO[bytes]) -> Iterator[bytes]:
    while piece := file.read(PIECE):
        yield piece


# Downloads an adapter's files from Hugging Face hubs, S3 and web servers. Each function blocks: call it in a thread.
#
# Every source has two steps. The first names what the files hold now, cheaply: a commit, entity tags, a digest. Equal names
# are equal files, so that what is in the cache is not downloaded again. The second writes the files into a folder.

SILENCE_S = 30.0  # of a server in the middle of a download


def hub_version(source: AdapterSource, *, most_bytes: int) -> str:
    """Return the commit of a hub's repository. Raises AdapterFilesError for one without the files, or too large."""
    try:
        from huggingface_hub import HfApi
    except ImportError:
        raise AdapterFilesError("hf:// needs the package huggingface_hub, which comes with vLLM and SGLang") from None
    try:
        about = HfApi().model_info(source.place, revision=source.revision or None, files_metadata=True, timeout=SILENCE_S)
    except Exception as error:
        raise AdapterFilesError(f"the hub does not give {source.place}: {error}") from error
    sizes = {file.rfilename: file.size or 0 for file in about.siblings or ()}
    _check_sizes(source, sizes, most_bytes)
    if about.sha is None:
        raise AdapterFilesError(f"the hub names no commit of {source.place}")
    return str(about.sha)


def from_hub(source: AdapterSource, commit: str, folder: Path) -> None:
    """Download the adapter's files as they were at this commit. Raises AdapterFilesError."""
    from huggingface_hub import hf_hub_download

    try:
        for name in FILES:
            hf_hub_download(source.place, name, revision=commit, local_dir=folder)
    except Exception as error:
        raise AdapterFilesError(f"the hub does not give {source.place}: {error}") from error


def objects_version(source: AdapterSource, *, most_bytes: int) -> str:
    """Return the entity tags of the two objects. Raises AdapterFilesError for missing ones, or too large."""
    bucket, _, prefix = source.place.partition("/")
    client = _s3()
    tags, sizes = [], {}
    for name in FILES:
        try:
            about = client.head_object(Bucket=bucket, Key=f"{prefix}/{name}")
        except Exception as error:
            raise AdapterFilesError(f"s3://{bucket}/{prefix}/{name} cannot be read: {error}") from error
        sizes[name] = about["ContentLength"]
        tags.append(about["ETag"])
    _check_sizes(source, sizes, most_bytes)
    return " ".join(tags)


def from_objects(source: AdapterSource, tags: str, folder: Path) -> None:
    """Download the two objects, if they still have these entity tags. Raises AdapterFilesError."""
    bucket, _, prefix = source.place.partition("/")
    client = _s3()
    for name, tag in zip(FILES, tags.split(" "), strict=True):
        try:
            body = client.get_object(Bucket=bucket, Key=f"{prefix}/{name}", IfMatch=tag)["Body"]
            with (folder / name).open("wb") as out:
                for piece in body.iter_chunks(PIECE):
                    out.write(piece)
        except Exception as error:
            raise AdapterFilesError(f"s3://{bucket}/{prefix}/{name} cannot be read: {error}") from error


def _s3() -> Any:
    """Return a client with the credentials and the region of the environment; `AWS_ENDPOINT_URL` names another store."""
    try:
        import boto3
        from botocore.config import Config
    except ImportError:
        raise AdapterFilesError("s3:// needs the package boto3: install the extra headrace[s3]") from None
    return boto3.client("s3", config=Config(connect_timeout=10, read_timeout=SILENCE_S, retries={"total_max_attempts": 3}))


class _CheckedRedirects(urllib.request.HTTPRedirectHandler):
    def __init__(self, allowed: AllowedSources, sha256: str) -> None:
        self._allowed = allowed
        self._sha256 = sha256

    def redirect_request(
        self, req: urllib.request.Request, fp: Any, code: int, msg: str, headers: Any, newurl: str
    ) -> urllib.request.Request | None:
        self._allowed.check(parse_source(f"{newurl.partition('#')[0]}#sha256={self._sha256}"))
        return super().redirect_request(req, fp, code, msg, headers, newurl)


def from_web(source: AdapterSource, folder: Path, *, allowed: AllowedSources, most_bytes: int) -> None:
    """Download an archive, check its digest and unpack it. Raises AdapterFilesError."""
    archive = folder / "archive"
    digest, size = hashlib.sha256(), 0
    opener = urllib.request.build_opener(_CheckedRedirects(allowed, source.sha256))
    try:
        with opener.open(source.place, timeout=SILENCE_S) as answer, archive.open("wb") as out:
            while piece := answer.read(PIECE):
                size += len(piece)
                if size > most_bytes:
                    raise AdapterFilesError(f"{source.address} has more than {most_bytes} bytes (worker.adapter_max_bytes)")
                digest.update(piece)
                out.write(piece)
    except (urllib.error.URLError, TimeoutError, ValueError, OSError) as error:
        raise AdapterFilesError(f"{source.address} cannot be downloaded: {error}") from None
    if digest.hexdigest() != source.sha256:
        raise AdapterFilesError(f"{source.address} has the digest {digest.hexdigest()}, not {source.sha256}")
    unpack(archive, folder, most_bytes=most_bytes)
    os.unlink(archive)


def _check_sizes(source: AdapterSource, sizes: Mapping[str, int], most_bytes: int) -> None:
    missing = [name for name in FILES if name not in sizes]
    if missing:
        raise AdapterFilesError(f"{source.address} has no {', '.join(missing)}")
    size = sum(sizes[name] for name in FILES)
    if size > most_bytes:
        raise AdapterFilesError(f"{source.address} has {size} bytes, more than {most_bytes} (worker.adapter_max_bytes)")


log = structlog.get_logger()

DOWNLOAD_S = 150.0  # with the engine's own time less than the commands that load an adapter wait
GIB = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterLimits:
    """The sources and sizes of adapters that the operator allows."""

    allowed: AllowedSources = field(default_factory=AllowedSources)
    most_bytes: int = 2 * GIB
    timeout_s: float = DOWNLOAD_S


class AdapterFiles:
    def __init__(self, limits: AdapterLimits, cache: AdapterCache, store: ObjectBucket | None) -> None:
        """`store`: the deployment's own; None where there is no connection to it yet."""
        self._limits = limits
        self._cache = cache
        self._store = store

    async def open(self, text: str) -> AdapterFolder:
        """Return the folder of an adapter. It stays while it is open. Raises AdapterFilesError.

        A folder without an adapter's configuration is left to the engine, which may read another format.
        """
        source = parse_source(text)
        self._limits.allowed.check(source)
        if source.kind == "folder":
            folder = Path(source.place)
            if _there(folder / CONFIG):
                await run_in_thread(lambda: check_adapter_folder(folder), name="adapter-check")
            return AdapterFolder(folder)
        version, download = await self._found(source)
        key = hashlib.sha256(f"{source.kind} {source.address} {version}".encode()).hexdigest()

        async def fill(folder: Path) -> None:
            await download(folder)
            await run_in_thread(lambda: check_adapter_folder(folder), name="adapter-check")
            log.info("adapter.downloaded", source=source.address, version=version)

        return await self._cache.open(key, fill, timeout_s=self._limits.timeout_s)

    async def _found(self, source: AdapterSource) -> tuple[str, Callable[[Path], Awaitable[None]]]:
        """Return the version of the files that the source has now, and how to download it."""
        most = self._limits.most_bytes
        match source.kind:
            case "store":
                return await self._stored(source)
            case "hf":
                commit = await run_in_thread(lambda: hub_version(source, most_bytes=most), name="adapter-version")
                return commit, _threaded(partial(from_hub, source, commit))
            case "s3":
                tags = await run_in_thread(lambda: objects_version(source, most_bytes=most), name="adapter-version")
                return tags, _threaded(partial(from_objects, source, tags))
            case _:
                work = partial(from_web, source, allowed=self._limits.allowed, most_bytes=most)
                return source.sha256, _threaded(work)

    async def _stored(self, source: AdapterSource) -> tuple[str, Callable[[Path], Awaitable[None]]]:
        store = self._store
        if store is None:
            raise AdapterFilesError(f"{source.address} can be loaded while the worker serves, not at its start")
        try:
            about = await store.info(source.place)
        except JetStreamError as error:
            raise AdapterFilesError(f"{source.address} cannot be read: {error}") from error
        if about.size > self._limits.most_bytes:
            raise AdapterFilesError(
                f"{source.address} has {about.size} bytes, more than {self._limits.most_bytes} (worker.adapter_max_bytes)"
            )

        async def download(folder: Path) -> None:
            archive = folder / "archive"
            digest = hashlib.sha256()
            try:
                with archive.open("wb") as out:
                    async for chunk in store.chunks(source.place):
                        digest.update(chunk)
                        out.write(chunk)
            except JetStreamError as error:
                raise AdapterFilesError(f"{source.address} cannot be read: {error}") from error
            if digest.hexdigest() != about.digest:
                raise AdapterFilesError(f"{source.address} was pushed again while it was read: load it once more")
            await run_in_thread(lambda: unpack(archive, folder, most_bytes=self._limits.most_bytes), name="adapter-unpack")
            archive.unlink()

        return about.digest, download


def _threaded(work: Callable[[Path], None]) -> Callable[[Path], Awaitable[None]]:
    async def run(folder: Path) -> None:
        await run_in_thread(lambda: work(folder), name="adapter-download")

    return run


async def open_engine_adapters(files: AdapterFiles, args: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, AdapterFolder]]:
    """Bring the adapters that an engine's settings name.

    Returns the settings with a folder in place of each source, and the folders by name. Raises EngineStartFailed. Settings of
    another shape are left to the engine's own check.
    """
    given = args.get(ADAPTERS_ARG)
    folders: dict[str, AdapterFolder] = {}
    if not isinstance(given, Mapping):
        return dict(args), folders
    try:
        for name, source in given.items():
            if isinstance(source, str) and source:
                folders[name] = await files.open(source)
    except AdapterFilesError as error:
        for folder in folders.values():
            folder.close()
        raise EngineStartFailed(f"{ADAPTERS_ARG}: {error}") from None
    return {**args, ADAPTERS_ARG: {**given, **{name: str(folder.path) for name, folder in folders.items()}}}, folders


def _there(path: Path) -> bool:
    """Return True for a file that is there. Raises AdapterFilesError for a path that can be none."""
    try:
        return path.exists()
    except OSError as error:  # a name that is too long
        raise AdapterFilesError(f"{str(path)[:200]!r} is no path of a folder: {error.strerror}") from None
