"""The `headrace` command line.

Flags are derived from the declared settings, and only the command that is asked for gets its flags: to make those of all
commands takes longer than everything else here.  A command imports the code that it runs only when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from headrace.base.errors import EXIT_FAILURE, CommandError
from headrace.base.process import import_patiently, import_structlog
from headrace.cli.command_parser import CommandParser
from headrace.cli.help_flags import ShowVersion
from headrace.commands.groups import EXIT_CODES, show_help

COMMAND_GROUP = "headrace.commands"

MAIN = f"""examples:
  headrace up                                     the bundled small model on http://127.0.0.1:8000
  headrace demo                                   an answer survives the worker that writes it
  headrace up --engine sim --workers 2            the simulator: no model, ready at once
  headrace up --mode disagg                       one worker computes prompts, another one the answers
  headrace up --model Qwen/Qwen3-0.6B --port 9000
  headrace frontend --nats nats://broker:4222     one part alone, on any machine
  headrace worker --engine vllm --model M --nats nats://broker:4222
  headrace router --nats nats://broker:4222
  headrace submit questions.jsonl --out answers.jsonl
  headrace streams status
  headrace dlq ls                                 requests that were taken out of service
  headrace doctor                                 what is wrong with this machine, the server or the deployment
  headrace help up                                the usual options of a command; `headrace up --help-all`: all of them

Every setting is a flag, an environment variable HEADRACE_… or a key of a TOML file (--config, HEADRACE_CONFIG or
./headrace.toml), in this order; `headrace config` shows what is in force. Durations are seconds.

{EXIT_CODES}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    import_patiently()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    prog = "headrace"
    try:
        parsed = build_parser(next((word for word in arguments if not word.startswith("-")), None)).parse_args(arguments)
        prog = parsed.prog
        import_structlog()
        code: int = parsed.run(parsed)
    except CommandError as error:
        sys.stderr.write(f"{prog}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return code


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, in which only `command` has its flags and the commands below it.

    Raises CommandError if the module of another package's command cannot be loaded.
    """
    parser = CommandParser(
        prog="headrace",
        description="LLM serving over NATS JetStream.",
        epilog=MAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action=ShowVersion, nargs=0, help="show the version and exit; `headrace version`: all versions"
    )
    parser.set_defaults(run=lambda _parsed: show_help(parser), prog="headrace")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    for name, (about, place) in _COMMANDS.items():
        if name == command:
            module, _, function = place.partition(":")
            getattr(import_module(module), function)(commands, about)
        else:
            commands.add_parser(name, help=about)
    if command not in _COMMANDS:  # looking through the installed packages takes some milliseconds
        for name, found in installed_commands().items():
            about = f"from {found.dist.name}" if found.dist else "from another package"
            if name == command:
                _load(found)(commands, about)
            else:
                commands.add_parser(name, help=about)
    return parser


def installed_commands() -> dict[str, EntryPoint]:
    """Return the commands that other packages bring, by name.

    A package declares one as an entry point of the group `headrace.commands`: a function `add(commands, about)` that adds its
    parser to argparse's subparsers and sets `run`, as the modules of `headrace/commands` do. A built-in name cannot be taken.
    """
    found = {point.name: point for point in entry_points(group=COMMAND_GROUP)}
    return {name: found[name] for name in sorted(found) if name not in _COMMANDS}


def _load(point: EntryPoint) -> Callable[[Any, str], None]:
    try:
        add: Callable[[Any, str], None] = point.load()
    except Exception as error:
        raise CommandError(f"command {point.name!r} ({point.value}) cannot be loaded: {error}") from error
    return add


# Command → its line in the list of commands, and the function that adds it, whose module is imported only for that command.
_COMMANDS: dict[str, tuple[str, str]] = {
    "up": ("run a whole deployment on this machine", "headrace.cli.parts:add_up"),
    "demo": ("see an answer survive the worker that writes it, in 15 seconds", "headrace.cli.demo:add_demo"),
    "chat": ("talk to a served model in the terminal", "headrace.cli.chat:add_chat"),
    "frontend": ("run an HTTP frontend", "headrace.cli.parts:add_frontend"),
    "worker": ("run an engine worker, or ask or tell running ones", "headrace.cli.parts:add_worker"),
    "router": ("run a router, or ask the routers", "headrace.cli.parts:add_router"),
    "submit": ("submit the lines of a file as jobs, and write their results", "headrace.cli.jobs:add_submit"),
    "jobs": ("list, show, cancel or watch stored jobs", "headrace.cli.jobs:add_jobs"),
    "trace": ("tell what happened to a request, when, where and why", "headrace.cli.trace:add_trace"),
    "top": ("watch workers, queues and streams live in the terminal", "headrace.cli.top:add_top"),
    "console": ("serve the view of a deployment in a browser", "headrace.cli.console:add_console"),
    "planner": ("say how many workers are needed soon, or start and drain them", "headrace.cli.planner:add_planner"),
    "doctor": ("check this machine, the NATS server and the running deployment", "headrace.cli.doctor:add_doctor"),
    "keys": ("make, list, revoke and rotate the API keys of the HTTP frontends", "headrace.cli.keys:add_keys"),
    "audit": ("list or follow the records of requests, and say how long they are kept", "headrace.cli.audit:add_audit"),
    "tenant": ("export or delete all that is stored of a tenant", "headrace.cli.tenant:add_tenant"),
    "init": ("make the logins of a deployment for a nats-server of your own", "headrace.cli.logins:add_init"),
    "steward": ("keep streams and make consumers for parts that log in with a role", "headrace.cli.logins:add_steward"),
    "streams": ("plan, apply, show or purge what Headrace keeps in NATS", "headrace.commands.streams:add_parser"),
    "bench": ("load a running server and report latencies, or replay a trace in virtual time", "headrace.cli.bench:add_bench"),
    "replay": ("rebuild the index of the past, or place its requests by another policy", "headrace.commands.replay:add_parser"),
    "dlq": ("list, show, run again or drop the requests that were taken out of service", "headrace.cli.dlq:add_dlq"),
    "chaos": (
        "kill, freeze and drain the parts of a deployment under load, and account for every request",
        "headrace.cli.chaos:add_chaos",
    ),
    "model": ("list or forget the models that are known, prepare the bundled one", "headrace.cli.tools:add_model"),
    "adapter": ("push LoRA adapters into the deployment, list or remove them", "headrace.cli.adapters:add_adapter"),
    "config": ("show the settings in force and where each comes from", "headrace.cli.tools:add_config"),
    "completion": ("print the completion script of a shell", "headrace.cli.completion:add_completion"),
    "version": ("show versions of Headrace, NATS and the installed engines", "headrace.cli.tools:add_version"),
}


def command_names() -> list[str]:
    """Return the names of all commands."""
    return [*_COMMANDS, *installed_commands()]
