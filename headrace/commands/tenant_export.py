"""Writes all that is stored of one tenant into a folder: JSON lines for each kind, contents as files, and a manifest."""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import CommandError
from headrace.broker.keys.records import KeyRecord
from headrace.broker.tenants.inventory import BUCKETS, TenantInventory
from headrace.jetstream.errors import ObjectNotFound
from headrace.jetstream.ports import StoredMessage

MANIFEST = "manifest.json"
PARTIAL = ".partial"

_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._-]")


class TenantExport:
    """An export that is being written. It is there whole, under its name, or not at all."""

    def __init__(self, inventory: TenantInventory, out: Path) -> None:
        self._inventory = inventory
        self._out = out
        self._partial = out.with_name(out.name + PARTIAL)
        self._files: list[dict[str, Any]] = []
        self._digest = hashlib.sha256()  # of the file that was written last
        self._counts: dict[str, int] = {}

    async def write(self, about: Mapping[str, Any]) -> dict[str, Any]:
        """Write the export and return its manifest, which begins with `about`.

        Raises CommandError where there is something at that place, or it cannot be written, and JetStreamError.
        """
        if self._out.exists():
            raise CommandError(f"{self._out} is there: name another folder with --out")
        try:
            if self._partial.exists():
                shutil.rmtree(self._partial)  # of an export that was interrupted
            self._partial.mkdir(mode=0o700, parents=True)
            await self._write_all()
            manifest = {**about, "counts": self._counts, "files": self._files}
            self._save(MANIFEST, json.dumps(manifest, indent=1).encode() + b"\n")
            self._partial.rename(self._out)
        except OSError as error:
            raise CommandError(f"the export cannot be written to {self._partial}: {error.strerror}") from None
        return manifest

    async def _write_all(self) -> None:
        inventory = self._inventory
        self._lines("keys", [key_line(key) for key in await inventory.keys()])
        for place in inventory.places:
            await self._message_lines(place.kind, inventory.messages(place))
        for kind in BUCKETS:
            entries = await inventory.entries(kind)
            self._lines(kind, [{"key": entry.key, "value": readable(entry.value)} for entry in entries])
        for kind, bucket in (("file_contents", "files"), ("large_results", "results")):
            for name in await inventory.objects(kind):
                await self._content(kind, bucket, name)
        for name in await inventory.objects("responses"):
            response = await inventory.response(name)
            if response is None:
                continue
            shown = msgspec.to_builtins(response)
            parts = {part: msgspec.Raw(getattr(response, part) or b"null") for part in ("answer", "input", "output")}
            self._count("responses")
            self._save(f"responses/{file_name(name)}.json", msgspec.json.encode({**shown, **parts}))

    async def _message_lines(self, kind: str, pages: AsyncIterator[list[StoredMessage]]) -> None:
        async for page in pages:
            self._lines(kind, [message_line(message) for message in page])

    def _lines(self, kind: str, lines: list[dict[str, Any]]) -> None:
        if lines:
            self._count(kind, len(lines))
            self._save(f"{kind}.jsonl", b"".join(msgspec.json.encode(line) + b"\n" for line in lines), more=True)

    async def _content(self, kind: str, bucket: str, name: str) -> None:
        store = self._inventory.messaging.objects(self._inventory.subjects.bucket(bucket))
        path = f"{kind}/{file_name(name.removeprefix(self._inventory.tenant)[1:])}"
        try:
            async for chunk in store.chunks(name):
                self._save(path, chunk, more=True)
        except ObjectNotFound:
            return  # it has ended its life meanwhile
        if not any(file["path"] == path for file in self._files):
            self._save(path, b"")
        self._count(kind)

    def _count(self, kind: str, number: int = 1) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + number

    def _save(self, path: str, data: bytes, *, more: bool = False) -> None:
        """Write a file, or add to the one that was written last; note its size and digest for the manifest."""
        target = self._partial / path
        target.parent.mkdir(mode=0o700, exist_ok=True)
        old = self._files[-1] if more and self._files and self._files[-1]["path"] == path else None
        flags = os.O_WRONLY | os.O_CREAT | (os.O_APPEND if old else os.O_EXCL)
        with os.fdopen(os.open(target, flags, 0o600), "ab") as file:
            file.write(data)
        if path == MANIFEST:
            return
        if old is None:
            self._digest = hashlib.sha256()
            old = {"path": path, "bytes": 0, "sha256": ""}
            self._files.append(old)
        self._digest.update(data)
        old["bytes"] += len(data)
        old["sha256"] = self._digest.hexdigest()


def key_line(key: KeyRecord) -> dict[str, Any]:
    """Return a key without its hashes."""
    return {name: value for name, value in msgspec.to_builtins(key).items() if name != "hashes"}


def message_line(message: StoredMessage) -> dict[str, Any]:
    """Return a stored message as an object of JSON."""
    return {
        "subject": message.subject,
        "sequence": message.seq,
        "stored": message.at,
        "headers": dict(message.headers or {}),
        "value": readable(message.data),
    }


def readable(data: bytes) -> Any:
    """Return stored bytes as JSON can hold them: JSON and msgpack as what they mean, other bytes as base64."""
    try:
        return msgspec.json.decode(data)  # not as it is: it may have line breaks
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        pass
    try:
        value = msgspec.msgpack.decode(data)
        msgspec.json.encode(value)  # keys that are no text
        return value
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, TypeError, ValueError):
        return {"base64": data}


def file_name(name: str) -> str:
    """Return the name of an object as that of a file, which leads to no other folder and is no other object's."""
    safe = _NOT_IN_NAMES.sub("_", name).lstrip(".")
    return safe if safe == name else f"{safe}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
