"""Adds `headrace adapter`, `headrace worker adapter load|unload` and `headrace model ls|rm` to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.commands.groups import add_group
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

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
    """Add `adapter` below `headrace worker`."""
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
    """Add `headrace adapter` and its actions."""
    actions = add_group(commands, "adapter", about=about, examples=ADAPTER_STORE_EXAMPLES)
    push = _add(actions, "adapter push", _run_push, "store the files of an adapter, so that workers anywhere can load it")
    push.add_argument("name", metavar="NAME", help="workers load it from store://NAME")
    push.add_argument("folder", metavar="FOLDER", type=Path, help="its folder here, in PEFT's format")
    ls = _add(actions, "adapter ls", _run_ls_pushed, "list the adapters that were pushed")
    ls.add_argument("--json", action="store_true", help="as JSON")
    rm = _add(actions, "adapter rm", _run_rm_pushed, "remove an adapter that was pushed")
    rm.add_argument("name", metavar="NAME", help="its name")


def add_model_commands(actions: Any) -> None:
    """Add `ls` and `rm` below `headrace model`."""
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
    from headrace.commands.adapter_store import push_adapter

    return push_adapter(located_settings(parsed), parsed.name, parsed.folder)


def _run_ls_pushed(parsed: argparse.Namespace) -> int:
    from headrace.commands.adapter_store import list_adapters

    return list_adapters(located_settings(parsed), as_json=parsed.json)


def _run_rm_pushed(parsed: argparse.Namespace) -> int:
    from headrace.commands.adapter_store import remove_adapter

    return remove_adapter(located_settings(parsed), parsed.name)


def _run_load(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.adapters import load_adapter

    settings = located_settings(parsed)
    return load_adapter(settings, parsed.name, parsed.source, worker=parsed.worker, model=parsed.model)


def _run_unload(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.adapters import unload_adapter

    settings = located_settings(parsed)
    return unload_adapter(settings, parsed.name, worker=parsed.worker, model=parsed.model, grace_s=parsed.grace)


def _run_ls(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.adapters import show_models

    return show_models(located_settings(parsed), as_json=parsed.json)


def _run_rm(parsed: argparse.Namespace) -> int:
    from headrace.commands.operating.adapters import forget_model

    return forget_model(located_settings(parsed), parsed.model)
