"""Runs `headrace adapter push|ls|rm`: the LoRA adapters in the deployment's object store."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path

from headrace.base.errors import EXIT_OK, CommandError
from headrace.commands.byte_sizes import size
from headrace.commands.operating.audit import announce
from headrace.commands.operating.control_client import columns, connected
from headrace.commands.progress import Progress
from headrace.config.settings import Settings
from headrace.jetstream.errors import ObjectNotFound
from headrace.jetstream.ports import Messaging, StoredObject
from headrace.jetstream.subjects import Subjects
from headrace.workers.adapter_files.archive import PIECE, pack
from headrace.workers.adapter_files.safe_files import check_adapter_folder
from headrace.workers.adapter_files.source import check_adapter_name
from headrace.workers.errors import AdapterFilesError

STORE = "adapters"


def push_adapter(settings: Settings, name: str, folder: Path) -> int:
    """Check an adapter's folder and store its files under `name`, in place of an older one. Raises CommandError."""
    try:
        check_adapter_name(name)
        check_adapter_folder(folder)
    except AdapterFilesError as error:
        raise CommandError(str(error)) from None

    async def push(messaging: Messaging, names: Subjects) -> StoredObject:
        with tempfile.TemporaryFile() as archive:
            pack(folder, archive)
            with Progress(archive.seek(0, os.SEEK_END), "bytes") as bar:
                archive.seek(0)
                async with messaging.objects(names.bucket(STORE)).writer(name) as writer:
                    while piece := archive.read(PIECE):
                        await writer.write(piece)
                        bar.update(len(piece))
                    stored = await writer.commit()
            announce(messaging, names, "adapter push", adapter=name, sha256=stored.digest)
            return stored

    stored = connected(settings, push, name="headrace adapter push")
    sys.stdout.write(f"{name}: {size(stored.size)}, sha256 {stored.digest}; load it from store://{name}\n")
    return EXIT_OK


def list_adapters(settings: Settings, *, as_json: bool) -> int:
    """Print the adapters that were pushed."""

    async def look(messaging: Messaging, names: Subjects) -> list[StoredObject]:
        return sorted(await messaging.objects(names.bucket(STORE)).list(), key=lambda one: one.name)

    found = connected(settings, look, name="headrace adapter ls")
    if as_json:
        objects = [{"name": one.name, "bytes": one.size, "sha256": one.digest, "stored": one.stored} for one in found]
        sys.stdout.write(json.dumps(objects, indent=1) + "\n")
        return EXIT_OK
    rows = [
        [one.name, size(one.size), f"{datetime.fromtimestamp(one.stored, UTC):%Y-%m-%d %H:%M}", one.digest] for one in found
    ]
    table = [["adapter", "size", "pushed (UTC)", "sha256"], *rows]
    sys.stdout.write(columns(table) if found else "no adapter was pushed\n")
    return EXIT_OK


def remove_adapter(settings: Settings, name: str) -> int:
    """Remove a pushed adapter. Workers that have loaded it keep it. Raises CommandError for one that is not there."""

    async def remove(messaging: Messaging, names: Subjects) -> bool:
        store = messaging.objects(names.bucket(STORE))
        try:
            await store.info(name)
        except ObjectNotFound:
            return False
        await store.delete(name)
        announce(messaging, names, "adapter rm", adapter=name)
        return True

    if not connected(settings, remove, name="headrace adapter rm"):
        raise CommandError(f"no adapter {name!r} was pushed; `headrace adapter ls` lists them")
    sys.stdout.write(f"{name} is removed; workers that have loaded it keep it\n")
    return EXIT_OK
