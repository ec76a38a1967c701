"""The commands `headrace adapter`, `headrace worker adapter` and `headrace model ls|rm`."""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from headrace.base.errors import EXIT_OK, CommandError
from headrace.broker.errors import BrokerError
from headrace.broker.messages.control import LoadAdapter, UnloadAdapter
from headrace.broker.models.card_store import (
    LOAD_S,
    MARGIN_S,
    AdapterClient,
    AdapterReply,
    ListedModel,
    list_models,
    remove_model,
)
from headrace.broker.models.cards import UNLOAD_GRACE_S
from headrace.commands.control import announce, check_grace, columns, connected, find_worker, live_workers, located_settings
from headrace.commands.groups import add_group
from headrace.commands.progress import Progress, size, told_while
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.errors import ObjectNotFound
from headrace.jetstream.ports import Messaging, StoredObject
from headrace.jetstream.subjects import Subjects
from headrace.workers.adapter_files import PIECE, pack
from headrace.workers.adapter_source import check_adapter_folder, check_adapter_name
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


ADAPTER_STORE_EXAMPLES = """examples:
  headrace adapter push sql ./out/sql
  headrace adapter ls
  headrace worker adapter load sql store://sql --model Qwen/Qwen3-0.6B
  headrace adapter rm sql

The folder has adapter_config.json and adapter_model.safetensors, as PEFT writes them. Pushing a name again replaces it for
workers that load it from then on."""

ADAPTER_EXAMPLES = """examples:
  headrace worker adapter load sql /adapters/sql --model Qwen/Qwen3-0.6B
  headrace worker adapter load sql /adapters/sql --worker worker-2
  headrace worker adapter load sql store://sql --model Qwen/Qwen3-0.6B
  headrace worker adapter unload sql --model Qwen/Qwen3-0.6B --grace 10

Returns when it is served, or gone, everywhere. A vLLM worker takes adapters if it was started with some or with
--engine-arg enable_lora=true (and max_loras, max_lora_rank). They are gone when the worker's process ends."""


def add_adapter_commands(actions: Any) -> None:
    text = "load or unload an adapter (LoRA) on running workers"
    described = f"{text[0].upper()}{text[1:]}."
    ways = add_group(actions, "worker adapter", about=text, description=described, examples=ADAPTER_EXAMPLES)
    load = _add(ways, "worker adapter load", _run_load, "load an adapter: requests that name it as their model reach it")
    unload = _add(ways, "worker adapter unload", _run_unload, "finish what runs on an adapter, and unload it")
    for parser in (load, unload):
        parser.add_argument("name", metavar="NAME", help="what clients call it")
        where = parser.add_mutually_exclusive_group(required=True)
        where.add_argument("--worker", metavar="ID", help="id or name of the one worker")
        where.add_argument("--model", metavar="MODEL", help="on all workers that this model has now")
    load.add_argument(
        "source", metavar="SOURCE", help="a folder on the workers' machines, store://NAME, hf://, s3:// or https://"
    )
    unload.add_argument(
        "--grace",
        type=float,
        default=60.0,
        metavar="SECONDS",
        help="how long what runs on it may take; the rest is handed over (default: 60)",
    )


def add_adapter(commands: Any, about: str) -> None:
    actions = add_group(commands, "adapter", about=about, examples=ADAPTER_STORE_EXAMPLES)
    push = _add(actions, "adapter push", _run_push, "store the files of an adapter, so that workers anywhere can load it")
    push.add_argument("name", metavar="NAME", help="workers load it from store://NAME")
    push.add_argument("folder", metavar="FOLDER", type=Path, help="its folder here, in PEFT's format")
    ls = _add(actions, "adapter ls", _run_ls_pushed, "list the adapters that were pushed")
    ls.add_argument("--json", action="store_true", help="as JSON")
    rm = _add(actions, "adapter rm", _run_rm_pushed, "remove an adapter that was pushed")
    rm.add_argument("name", metavar="NAME", help="its name")


def add_model_commands(actions: Any) -> None:
    ls = _add(actions, "model ls", _run_ls, "list the models that are known, with or without workers")
    ls.add_argument("--json", action="store_true", help="as JSON")
    rm = _add(actions, "model rm", _run_rm, "forget a model that has no worker any more")
    rm.add_argument("model", metavar="MODEL", help="its name, or the id of its pool")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name.rpartition(" ")[2], help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace {name}")
    return parser


def _run_push(parsed: argparse.Namespace) -> int:

    return push_adapter(located_settings(parsed), parsed.name, parsed.folder)


def _run_ls_pushed(parsed: argparse.Namespace) -> int:

    return list_adapters(located_settings(parsed), as_json=parsed.json)


def _run_rm_pushed(parsed: argparse.Namespace) -> int:

    return remove_adapter(located_settings(parsed), parsed.name)


def _run_load(parsed: argparse.Namespace) -> int:

    settings = located_settings(parsed)
    return load_adapter(settings, parsed.name, parsed.source, worker=parsed.worker, model=parsed.model)


def _run_unload(parsed: argparse.Namespace) -> int:

    settings = located_settings(parsed)
    return unload_adapter(settings, parsed.name, worker=parsed.worker, model=parsed.model, grace_s=parsed.grace)


def _run_ls(parsed: argparse.Namespace) -> int:

    return show_models(located_settings(parsed), as_json=parsed.json)


def _run_rm(parsed: argparse.Namespace) -> int:

    return forget_model(located_settings(parsed), parsed.model)
