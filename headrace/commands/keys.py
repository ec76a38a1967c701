"""Runs `headrace keys create`, `ls`, `revoke` and `rotate`."""

from __future__ import annotations

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
from headrace.broker.keys.errors import ApiKeyError
from headrace.broker.keys.records import CLIENT_SCOPES, KeyRecord, Limits
from headrace.broker.keys.store import KeyStore
from headrace.commands.operating.control_client import columns, connected
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
    """A key as it is asked for on the command line."""

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
    """Run `headrace keys ls`."""
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
