"""The command `headrace tenant`: exports and deletes the stored data of a tenant."""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.broker.keys import KeyRecord
from headrace.broker.tenants import BUCKETS, TenantErasure, TenantInventory
from headrace.commands.control import announce, columns, connected, located_settings, user_name
from headrace.commands.groups import add_group
from headrace.commands.progress import told_while
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import ObjectNotFound
from headrace.jetstream.ports import StoredMessage
from headrace.jetstream.subjects import Subjects

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


def export_tenant(settings: Settings, tenant: str, out: Path, *, as_json: bool) -> int:
    """Run `headrace tenant export`. Raises CommandError."""
    _check(tenant)

    async def export(connection: Connection, names: Subjects) -> dict[str, Any]:
        inventory = TenantInventory(connection, names, tenant)
        about = {"tenant": tenant, "prefix": names.prefix, "exported": time.time(), "by": user_name()}
        manifest = await told_while(TenantExport(inventory, out).write(about), "exporting")
        announce(connection, names, "tenant export", tenant=tenant, **manifest["counts"])
        await connection.barrier()
        return manifest

    manifest = connected(settings, export, name="headrace tenant")
    if as_json:
        sys.stdout.write(json.dumps(manifest, indent=1) + "\n")
    else:
        sys.stdout.write(_table(manifest["counts"]) + f"in {out}, described by {out / MANIFEST}\n")
    return EXIT_OK


def delete_tenant(settings: Settings, tenant: str, *, sure: bool, as_json: bool) -> int:
    """Run `headrace tenant delete`: count, or delete if `sure`. Raises CommandError."""
    _check(tenant)

    async def delete(connection: Connection, names: Subjects) -> tuple[dict[str, int], bool]:
        inventory = TenantInventory(connection, names, tenant)
        if not sure:
            return await inventory.counts(), True
        announce(connection, names, "tenant delete", tenant=tenant, state="begun")
        counts, whole = await told_while(TenantErasure(inventory).run(), "deleting")
        announce(connection, names, "tenant delete", tenant=tenant, state="done" if whole else "not finished", **counts)
        await connection.barrier()
        return counts, whole

    counts, whole = connected(settings, delete, name="headrace tenant")
    if as_json:
        told = {
            "tenant": tenant,
            "deleted": sure,
            "nothing_left": whole and sure,
            "counts": counts,
        }
        sys.stdout.write(json.dumps(told) + "\n")
    else:
        sys.stdout.write(_table(counts))
        if not sure and counts:
            sys.stdout.write("nothing is deleted yet: add --yes\n")
    if not whole:
        sys.stderr.write(
            f"data of {tenant!r} is still being written, by jobs that run for example: run the same command again\n"
        )
        return EXIT_FAILURE
    return EXIT_OK


def _check(tenant: str) -> None:
    if not tenant or not tenant.isprintable():
        raise CommandError(f"a tenant has printable characters, and `_` is that of requests without one; got {tenant!r}")


def _table(counts: Mapping[str, int]) -> str:
    if not counts:
        return "nothing is stored of this tenant\n"
    return columns([["kind", "number"], *([kind, str(number)] for kind, number in counts.items())])


EXAMPLES = """examples:
  headrace tenant export acme --out acme-data     all that is stored of acme, with a manifest
  headrace tenant delete acme                     says what would be deleted
  headrace tenant delete acme --yes               deletes it; run again after an interruption

A tenant is named as its keys and headers name it; `_` is that of requests without one. The keys of a deleted tenant are revoked
and stay listed. Not among it: logs, and what the nats-server's disk still holds of deleted messages."""


def add_tenant(commands: Any, about: str) -> None:
    actions = add_group(
        commands,
        "tenant",
        about=about,
        description="All that a deployment has stored of one tenant: keys, jobs, results, responses, files, batches, usage.",
        examples=EXAMPLES,
    )
    export = _add(actions, "export", _run_export, "write all that is stored of a tenant into a folder")
    export.add_argument("--out", metavar="FOLDER", type=Path, required=True, help="where; it must not be there yet")
    delete = _add(actions, "delete", _run_delete, "delete all that is stored of a tenant")
    delete.add_argument("--yes", action="store_true", help="do it; without this flag it is only counted")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("tenant", metavar="TENANT", help="its name; _ is that of requests without a tenant")
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace tenant {name}")
    return parser


def _run_export(parsed: argparse.Namespace) -> int:

    return export_tenant(located_settings(parsed), parsed.tenant, parsed.out, as_json=parsed.json)


def _run_delete(parsed: argparse.Namespace) -> int:

    return delete_tenant(located_settings(parsed), parsed.tenant, sure=parsed.yes, as_json=parsed.json)
