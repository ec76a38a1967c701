"""Runs `headrace keys create`, `ls`, `revoke` and `rotate`."""

from __future__ import annotations

import argparse
import getpass
import json
import re
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.keys import CLIENT_SCOPES, ApiKeyError, KeyRecord, KeyStore, Limits
from headrace.commands.control import columns, connected, located_settings
from headrace.commands.groups import add_group
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import TopologyError
from headrace.jetstream.provision import ensure_streams
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

T = TypeVar("T")

_TIME = re.compile(r"(?P<n>\d+(\.\d+)?)(?P<unit>[smhd]?)\Z")
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86_400.0}
_LIMITS = {
    "requests_per_minute": "requests/min",
    "tokens_per_minute": "tokens/min",
    "concurrent": "at once",
    "tokens_per_day": "tokens/day",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyWish:
    name: str
    tenant: str | None = None
    scopes: str | None = None
    models: Sequence[str] = ()
    expires: str | None = None
    limits: dict[str, int] = field(default_factory=dict)
    tenant_limits: dict[str, int] = field(default_factory=dict)


def create_key(settings: Settings, wish: KeyWish, *, as_json: bool) -> int:
    """Run `headrace keys create` and print the key, which is nowhere kept. Raises CommandError."""
    record = KeyRecord(
        id="",
        name=wish.name,
        tenant=wish.tenant if wish.tenant is not None else wish.name,
        hashes=[],
        scopes=_scopes(wish.scopes),
        models=list(wish.models),
        created=0.0,
        limits=Limits(**wish.limits),
        tenant_limits=Limits(**wish.tenant_limits),
        expires=time.time() + seconds_of(wish.expires, "--expires") if wish.expires else 0.0,
        created_by=_me(),
    )
    made, text = _with_store(settings, lambda store: store.create(record), name="headrace keys create")
    _show_new(made, text, as_json=as_json)
    return EXIT_OK


def list_keys(settings: Settings, *, as_json: bool) -> int:
    found = _with_store(settings, lambda store: store.all(), name="headrace keys ls")
    now = time.time()
    if as_json:
        sys.stdout.write(json.dumps([_as_data(record, now) for record in found], indent=1) + "\n")
        return EXIT_OK
    head = ["key", "name", "tenant", "state", "scopes", "models", "limits", "expires"]
    sys.stdout.write(columns([head, *(_row(record, now) for record in found)]) if found else "there are no keys\n")
    return EXIT_OK


def revoke_key(settings: Settings, key: str, *, as_json: bool) -> int:
    """Run `headrace keys revoke`. Raises CommandError for a key that is not there."""

    async def change(store: KeyStore) -> KeyRecord:
        return await store.revoke((await store.find(key)).id)

    record = _with_store(settings, change, name="headrace keys revoke")
    text = json.dumps(_as_data(record, time.time())) if as_json else f"{record.id} ({record.name}) is revoked"
    sys.stdout.write(f"{text}\n")
    return EXIT_OK


def rotate_key(settings: Settings, key: str, *, grace: str, as_json: bool) -> int:
    """Run `headrace keys rotate` and print the new text. Raises CommandError for a key that is not there or not good."""
    grace_s = seconds_of(grace, "--grace")

    async def change(store: KeyStore) -> tuple[KeyRecord, str]:
        return await store.rotate((await store.find(key)).id, grace_s=grace_s)

    record, text = _with_store(settings, change, name="headrace keys rotate")
    _show_new(record, text, as_json=as_json)
    return EXIT_OK


def seconds_of(text: str, flag: str) -> float:
    """Return a duration such as 90d, 12h, 30m or 45 in seconds. Raises CommandError."""
    match = _TIME.match(text)
    if match is None:
        raise CommandError(f"{flag} must be a time such as 90d, 12h, 30m or 45s, got {text!r}")
    return float(match["n"]) * _UNITS[match["unit"]]


def _with_store(settings: Settings, act: Callable[[KeyStore], Awaitable[T]], *, name: str) -> T:
    async def run(connection: Connection, names: Subjects) -> T:
        try:
            return await act(KeyStore(connection, names))
        except TopologyError:  # no part of this version has run here yet
            wanted = f"KV_{names.bucket('keys')}"
            await ensure_streams(
                connection, [s for s in Topology(names, replicas=connection.options.replicas).all_streams() if s.name == wanted]
            )
            return await act(KeyStore(connection, names))

    try:
        return connected(settings, run, name=name)
    except ApiKeyError as error:
        raise CommandError(str(error)) from None


def _scopes(text: str | None) -> list[str]:
    if text is None:
        return list(CLIENT_SCOPES)
    return sorted({scope.strip() for scope in text.split(",") if scope.strip()})


def _show_new(record: KeyRecord, text: str, *, as_json: bool) -> None:
    if as_json:
        sys.stdout.write(json.dumps({**_as_data(record, time.time()), "secret": text}, indent=1) + "\n")
        return
    sys.stderr.write(f"{record.id}: tenant {record.tenant}, scopes {', '.join(record.scopes)}. It is shown only now:\n")
    sys.stdout.write(f"{text}\n")


def _row(record: KeyRecord, now: float) -> list[str]:
    expires = datetime.fromtimestamp(record.expires, UTC).strftime("%Y-%m-%d %H:%M") if record.expires else "never"
    scopes = "client" if set(record.scopes) == set(CLIENT_SCOPES) else ",".join(record.scopes)
    limits = [*_limit_texts(record.limits), *(f"tenant {text}" for text in _limit_texts(record.tenant_limits))]
    models = ",".join(record.models) or "all"
    return [record.id, record.name, record.tenant, record.state(now), scopes, models, "; ".join(limits) or "none", expires]


def _limit_texts(limits: Limits) -> list[str]:
    return [f"{getattr(limits, name)} {text}" for name, text in _LIMITS.items() if getattr(limits, name)]


def _as_data(record: KeyRecord, now: float) -> dict[str, Any]:
    shown: dict[str, Any] = msgspec.to_builtins(record)
    shown = {name: value for name, value in shown.items() if name not in ("v", "hashes")}
    return {**shown, "state": record.state(now)}


def _me() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


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

_LIMIT_FLAGS = {
    "rpm": ("requests_per_minute", "requests in a minute"),
    "tpm": ("tokens_per_minute", "tokens of prompts and answers in a minute"),
    "concurrent": ("concurrent", "requests at once"),
    "tokens-per-day": ("tokens_per_day", "tokens in a day (UTC)"),
}


def add_keys(commands: Any, about: str) -> None:
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
        for flag, (_, text) in _LIMIT_FLAGS.items():
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
    return {field: getattr(parsed, f"{prefix}{flag}".replace("-", "_")) for flag, (field, _) in _LIMIT_FLAGS.items()}


def _run_create(parsed: argparse.Namespace) -> int:

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

    return list_keys(located_settings(parsed), as_json=parsed.json)


def _run_revoke(parsed: argparse.Namespace) -> int:

    return revoke_key(located_settings(parsed), parsed.key, as_json=parsed.json)


def _run_rotate(parsed: argparse.Namespace) -> int:

    return rotate_key(located_settings(parsed), parsed.key, grace=parsed.grace, as_json=parsed.json)
