"""Adds the commands that run a part of a deployment to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

from headrace.cli.help_flags import add_help_flags
from headrace.cli.workers_and_routers import add_router_questions, add_worker_commands
from headrace.commands.groups import EXIT_CODES
from headrace.commands.running_deployment import part_settings
from headrace.config.flags import add_setting_flags, read_settings
from headrace.config.options import Command

# The options that `--help` shows; `--help-all` shows the others too.
_USUAL = {
    "up": "--config --data-dir --nats --verbose --mode --workers --prefill-workers --decode-workers --routers --grace --host "
    "--port --engine --model --served-name --slots --engine-arg",
    "frontend": "--config --nats --host --port --deadline --max-body --drain-grace --log-level",
    "worker": "--config --data-dir --nats --engine --model --served-name --name --role --slots --engine-arg --tool-parser "
    "--reasoning-parser --drain-grace --metrics-port",
    "router": "--config --nats --name --model --window --policy --router-metrics-port --drain-grace",
}
USUAL = {command: frozenset(flags.split()) for command, flags in _USUAL.items()}

UP_EXAMPLES = """examples:
  headrace up
  headrace up --engine sim --workers 4 --port 0
  headrace up --mode disagg --prefill-workers 2 --decode-workers 2
  headrace up --model ./my-model --engine-arg max_model_len=4096 --engine-arg enforce_eager=true
  headrace up --nats nats://broker:4222           with an existing NATS server

Runs nats-server, one frontend and the workers as processes of their own and restarts what crashes. Ctrl-C stops all of
them and lets workers finish first; a second Ctrl-C kills them. <data-dir>/run/up.json says what runs where."""

FRONTEND_EXAMPLES = """example:
  headrace frontend --nats nats://broker:4222 --host 0.0.0.0 --auth keys

SIGTERM finishes running answers first; a second one, or Ctrl-C, stops at once."""

WORKER_EXAMPLES = """examples:
  headrace worker --engine sim --nats nats://broker:4222
  headrace worker --engine vllm --model Qwen/Qwen3-0.6B --engine-arg gpu_memory_utilization=0.8
  headrace worker --engine sim --role prefill     computes prompts for workers in the role decode
  headrace worker status                          the workers that run, their roles and what they hold
  headrace worker drain worker-1                  ask a worker anywhere to finish and leave
  headrace worker role worker-1 prefill           give it another role
  headrace worker adapter load sql /adapters/sql --model M
  headrace worker health worker-1                 whether it, and its engine, can serve
  headrace worker sleep worker-1                  finish, free the engine's memory, keep the process
  headrace worker wake worker-1

SIGTERM drains: no new work, running work is finished or handed over. A second one, or Ctrl-C, stops at once."""

ROUTER_EXAMPLES = """examples:
  headrace router --nats nats://broker:4222       place the requests of all models
  headrace router --model Qwen/Qwen3-0.6B --window 4096
  headrace router status                          the routers that run, and what they hold
  headrace router explain REQUEST-ID              why a request is where it is

Any number of routers share the work; without one, workers place requests on themselves. SIGTERM finishes what is being
placed, gives the rest back and leaves; a second one, or Ctrl-C twice, stops at once."""


def add_up(commands: Any, about: str) -> None:
    """Add `headrace up`."""
    _add(commands, "up", _run_up, about=about, epilog=UP_EXAMPLES)


def add_frontend(commands: Any, about: str) -> None:
    """Add `headrace frontend`."""
    _add(commands, "frontend", _run_frontend, about=about, epilog=FRONTEND_EXAMPLES)


def add_worker(commands: Any, about: str) -> None:
    """Add `headrace worker` and the commands below it."""
    add_worker_commands(_add(commands, "worker", _run_worker, about=about, epilog=WORKER_EXAMPLES))


def add_router(commands: Any, about: str) -> None:
    """Add `headrace router` and the commands below it."""
    add_router_questions(_add(commands, "router", _run_router, about=about, epilog=ROUTER_EXAMPLES))


def _add(
    commands: Any,
    name: Command,
    run: Callable[[argparse.Namespace], int],
    *,
    about: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        usage=f"headrace {name} [options]",
        description=about[0].upper() + about[1:] + ".",
        epilog=f"{epilog}\n\n{EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        add_help=False,
    )
    parser.set_defaults(run=run, prog=f"headrace {name}")
    add_help_flags(parser, add_setting_flags(parser, name), usual=USUAL[name])
    return parser


def _run_up(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_up

    return run_up(read_settings(parsed, "up"))


def _run_frontend(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_frontend

    return run_frontend(part_settings(read_settings(parsed, "frontend"), ["ingress"]))


def _run_worker(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_worker
    from headrace.up.server_logins import logins_by_hand

    settings = read_settings(parsed, "worker")
    return run_worker(part_settings(settings, logins_by_hand(settings)))


def _run_router(parsed: argparse.Namespace) -> int:
    from headrace.commands.run import run_router

    return run_router(part_settings(read_settings(parsed, "router"), ["router"]))
