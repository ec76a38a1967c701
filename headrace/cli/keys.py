"""Adds `headrace keys` and its actions on API keys to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.commands.groups import add_group
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

EXAMPLES = """examples:
  headrace keys create alice                      a key for the tenant alice, printed once
  headrace keys create ci --tenant acme --scope generate,models --model 'Qwen/*' --expires 90d
  headrace keys create app --rpm 600 --tpm 100000 --concurrent 32 --tenant-tokens-per-day 20000000
  headrace keys create gateway --scope generate,embed,models,act_as
  headrace keys ls
  headrace keys rotate ci --grace 1h
  headrace keys revoke alice

scopes: generate, embed, tokens, models, stored, files, batches (these are the default); priority, direct (choosing workers and
asking why), act_as (other tenants by x-headrace-tenant), metrics, admin. All frontends obey within a second."""

_LIMITS = {
    "rpm": ("requests_per_minute", "requests in a minute"),
    "tpm": ("tokens_per_minute", "tokens of prompts and answers in a minute"),
    "concurrent": ("concurrent", "requests at once"),
    "tokens-per-day": ("tokens_per_day", "tokens in a day (UTC)"),
}


def add_keys(commands: Any, about: str) -> None:
    """Add `headrace keys` and its actions."""
    actions = add_group(
        commands,
        "keys",
        about=about,
        description="API keys: who may ask the HTTP frontends of a deployment what, and how much.",
        examples=EXAMPLES,
    )
    create = _add(actions, "create", _run_create, "make a key and show it, once")
    create.add_argument("name", metavar="NAME", help="what the key is called")
    create.add_argument("--tenant", metavar="TENANT", help="whom it stands for (default: the key's name)")
    create.add_argument("--scope", metavar="SCOPE,…", help="what it may do (default: all that clients do for their own tenant)")
    create.add_argument("--model", metavar="PATTERN", action="append", default=[], help="models it may use; repeatable")
    create.add_argument("--expires", metavar="TIME", help="how long it is good: 90d, 12h, 30m (default: until it is revoked)")
    for of, prefix in (("this key", ""), ("all keys of its tenant together", "tenant-")):
        for flag, (_, text) in _LIMITS.items():
            create.add_argument(f"--{prefix}{flag}", type=int, metavar="N", default=0, help=f"most {text} of {of}")
    _add(actions, "ls", _run_ls, "list all keys, oldest first, without their secrets")
    revoke = _add(actions, "revoke", _run_revoke, "refuse a key from now on, everywhere")
    rotate = _add(actions, "rotate", _run_rotate, "give a key a new secret and show it, once")
    for parser in (revoke, rotate):
        parser.add_argument("key", metavar="KEY", help="its id or name")
    rotate.add_argument("--grace", metavar="TIME", default="0", help="how long the old secret stays good (default: not at all)")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--json", action="store_true", help="as JSON")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace keys {name}")
    return parser


def _limits(parsed: argparse.Namespace, prefix: str) -> dict[str, int]:
    return {field: getattr(parsed, f"{prefix}{flag}".replace("-", "_")) for flag, (field, _) in _LIMITS.items()}


def _run_create(parsed: argparse.Namespace) -> int:
    from headrace.commands.keys import KeyWish, create_key

    wish = KeyWish(
        name=parsed.name,
        tenant=parsed.tenant,
        scopes=parsed.scope,
        models=parsed.model,
        expires=parsed.expires,
        limits=_limits(parsed, ""),
        tenant_limits=_limits(parsed, "tenant-"),
    )
    return create_key(located_settings(parsed), wish, as_json=parsed.json)


def _run_ls(parsed: argparse.Namespace) -> int:
    from headrace.commands.keys import list_keys

    return list_keys(located_settings(parsed), as_json=parsed.json)


def _run_revoke(parsed: argparse.Namespace) -> int:
    from headrace.commands.keys import revoke_key

    return revoke_key(located_settings(parsed), parsed.key, as_json=parsed.json)


def _run_rotate(parsed: argparse.Namespace) -> int:
    from headrace.commands.keys import rotate_key

    return rotate_key(located_settings(parsed), parsed.key, grace=parsed.grace, as_json=parsed.json)
