"""Runs `headrace tenant export` and `delete`."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.broker.tenants.erasure import TenantErasure
from headrace.broker.tenants.inventory import TenantInventory
from headrace.commands.operating.audit import announce, user_name
from headrace.commands.operating.control_client import columns, connected
from headrace.commands.tenant_export import MANIFEST, TenantExport
from headrace.commands.waiting import told_while
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects


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
