"""Turns the source of an adapter into a checked folder on this machine that its engine can read."""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import structlog

from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.ports import ObjectBucket
from headrace.workers.adapter_files import downloads
from headrace.workers.adapter_files.archive import unpack
from headrace.workers.adapter_files.cache import AdapterCache, AdapterFolder
from headrace.workers.adapter_files.safe_files import CONFIG, check_adapter_folder
from headrace.workers.adapter_files.source import AdapterSource, AllowedSources, parse_source
from headrace.workers.blocking import run_in_thread
from headrace.workers.errors import AdapterFilesError, EngineStartFailed
from headrace.workers.lora_adapters import ADAPTERS_ARG

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
    """The adapters that a worker can get at."""

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
                commit = await run_in_thread(lambda: downloads.hub_version(source, most_bytes=most), name="adapter-version")
                return commit, _threaded(partial(downloads.from_hub, source, commit))
            case "s3":
                tags = await run_in_thread(lambda: downloads.objects_version(source, most_bytes=most), name="adapter-version")
                return tags, _threaded(partial(downloads.from_objects, source, tags))
            case _:
                work = partial(downloads.from_web, source, allowed=self._limits.allowed, most_bytes=most)
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
