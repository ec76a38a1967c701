"""Runs `headrace worker adapter` (adapters of running workers) and `headrace model ls|rm` (the known models)."""

from __future__ import annotations

import json
import sys
from collections.abc import Awaitable, Callable
from typing import TypeVar

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.errors import BrokerError
from headrace.broker.messages import LoadAdapter, UnloadAdapter
from headrace.broker.models.adapter_client import LOAD_S, MARGIN_S, AdapterClient, AdapterReply
from headrace.broker.models.card_store import ListedModel, list_models, remove_model
from headrace.broker.models.cards import UNLOAD_GRACE_S
from headrace.commands.operating.audit import announce
from headrace.commands.operating.control import check_grace, find_worker, live_workers
from headrace.commands.operating.control_client import columns, connected
from headrace.commands.waiting import told_while
from headrace.config.settings import Settings
from headrace.jetstream.ports import Messaging
from headrace.jetstream.subjects import Subjects

T = TypeVar("T")


def load_adapter(settings: Settings, name: str, source: str, *, worker: str | None, model: str | None) -> int:
    """Load an adapter and return when one worker, or all workers of a model, serve it. Raises CommandError."""

    async def tell(messaging: Messaging, names: Subjects) -> list[AdapterReply]:
        desk = AdapterClient(messaging, names)
        if worker is not None:
            member = find_worker(worker, await live_workers(messaging, names))
            return await desk.tell([member], LoadAdapter(name=name, source=source), timeout_s=LOAD_S)
        return await desk.load((await _find_model(settings, messaging, names, model or "")).card.pool, name, source)

    return _show(_connected(settings, _told(tell, f"loading adapter {name}"), "headrace worker adapter load"))


def unload_adapter(
    settings: Settings, name: str, *, worker: str | None, model: str | None, grace_s: float = UNLOAD_GRACE_S
) -> int:
    """Unload an adapter and return when it is gone from one worker, or from all workers of a model. Raises CommandError."""
    check_grace(grace_s)

    async def tell(messaging: Messaging, names: Subjects) -> list[AdapterReply]:
        desk = AdapterClient(messaging, names)
        if worker is not None:
            member = find_worker(worker, await live_workers(messaging, names))
            return await desk.tell([member], UnloadAdapter(name=name, grace_s=grace_s), timeout_s=grace_s + MARGIN_S)
        found = await _find_model(settings, messaging, names, model or "")
        told = await desk.unload(found.card.pool, name, grace_s=grace_s)
        if not told and name not in found.card.adapters:
            known = ", ".join(found.card.adapters) or "none"
            raise CommandError(f"model {found.card.model!r} has no adapter {name!r}; it has: {known}")
        return told or [AdapterReply("", True, f"no worker had {name!r}; it is forgotten")]

    return _show(_connected(settings, _told(tell, f"unloading adapter {name}"), "headrace worker adapter unload"))


def show_models(settings: Settings, *, as_json: bool) -> int:
    """Run `headrace model ls`: print every known model, with or without workers."""
    found = _connected(settings, list_models, "headrace model ls")
    if as_json:
        rows = [{"workers": [m.worker for m in model.workers], **msgspec.to_builtins(model.card)} for model in found]
        sys.stdout.write(json.dumps(rows, indent=1) + "\n")
        return EXIT_OK
    table = [["model", "namespace", "pool", "workers", "adapters", "aliases"]]
    for model in found:
        card = model.card
        having = {name: sum(name in member.adapters for member in model.workers) for name in card.adapters}
        adapters = ", ".join(f"{name} ({count})" for name, count in having.items())
        aliases = ", ".join(card.aliases)
        table.append([card.model, card.namespace, card.pool, str(len(model.workers)), adapters or "-", aliases or "-"])
    sys.stdout.write(columns(table) if found else "no model is known\n")
    return EXIT_OK


def forget_model(settings: Settings, name: str) -> int:
    """Run `headrace model rm`. Raises CommandError while the model has live workers, or when none has that name."""

    async def forget(messaging: Messaging, names: Subjects) -> list[str]:
        pools = [card.pool for card in await remove_model(messaging, names, name)]
        announce(messaging, names, "model rm", model=name, pools=pools)
        return pools

    for pool in _connected(settings, forget, "headrace model rm"):
        sys.stdout.write(f"{name} ({pool}) is forgotten: requests for it get 404 from now on\n")
    return EXIT_OK


async def _find_model(settings: Settings, messaging: Messaging, names: Subjects, wanted: str) -> ListedModel:
    """Return the model with a name or alias in the namespace of the settings. Raises CommandError naming the known models."""
    listed = [model for model in await list_models(messaging, names) if model.card.namespace == settings["namespace"]]
    for model in listed:
        if model.card.model == wanted:
            return model
    for model in listed:
        if wanted in model.card.aliases:
            return model
    raise CommandError(f"no model {wanted!r} is known; known: {', '.join(model.card.model for model in listed) or 'none'}")


def _told(ask: Callable[[Messaging, Subjects], Awaitable[T]], what: str) -> Callable[[Messaging, Subjects], Awaitable[T]]:
    return lambda messaging, names: told_while(ask(messaging, names), what)


def _connected(settings: Settings, ask: Callable[[Messaging, Subjects], Awaitable[T]], name: str) -> T:
    try:
        return connected(settings, ask, name=name)
    except BrokerError as error:
        raise CommandError(str(error)) from None


def _show(told: list[AdapterReply]) -> int:
    failed = [one for one in told if not one.ok]
    for one in told:
        if one.ok:
            sys.stdout.write(f"{one.message}\n")
    if failed:
        raise CommandError("; ".join(f"worker {one.worker} refused: {one.message}" for one in failed))
    return EXIT_OK
