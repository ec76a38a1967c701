"""Adds `headrace tenant` and its actions on the data of one tenant to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.commands.groups import add_group
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

EXAMPLES = """examples:
  headrace tenant export acme --out acme-data     all that is stored of acme, with a manifest
  headrace tenant delete acme                     says what would be deleted
  headrace tenant delete acme --yes               deletes it; run again after an interruption

A tenant is named as its keys and headers name it; `_` is that of requests without one. The keys of a deleted tenant are revoked
and stay listed. Not among it: logs, and what the nats-server's disk still holds of deleted messages."""


def add_tenant(commands: Any, about: str) -> None:
    """Add `headrace tenant` and its actions."""
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
    from headrace.commands.tenant import export_tenant

    return export_tenant(located_settings(parsed), parsed.tenant, parsed.out, as_json=parsed.json)


def _run_delete(parsed: argparse.Namespace) -> int:
    from headrace.commands.tenant import delete_tenant

    return delete_tenant(located_settings(parsed), parsed.tenant, sure=parsed.yes, as_json=parsed.json)
