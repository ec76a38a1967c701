"""The `headrace` command line.

Flags are derived from the declared settings, and only the command that is asked for gets its flags: to make those of all
commands takes longer than everything else here.  A command imports the code that it runs only when it runs.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from headrace.cli.adapters import add_adapter
from headrace.cli.audit import add_audit
from headrace.cli.chaos import add_chaos
from headrace.cli.chat import add_chat
from headrace.cli.command_parser import CommandParser
from headrace.cli.completion import add_completion
from headrace.cli.console import add_console
from headrace.cli.demo import add_demo
from headrace.cli.dlq import add_dlq
from headrace.cli.doctor import add_doctor
from headrace.cli.help_flags import ShowVersion
from headrace.cli.help_texts import MAIN
from headrace.cli.jobs import add_jobs, add_submit
from headrace.cli.keys import add_keys
from headrace.cli.logins import add_elector, add_init, add_steward
from headrace.cli.parts import add_frontend, add_router, add_up, add_worker
from headrace.cli.planner import add_planner
from headrace.cli.tenant import add_tenant
from headrace.cli.tools import add_bench, add_config, add_model, add_replay, add_streams, add_version
from headrace.cli.top import add_top
from headrace.cli.trace import add_trace
from headrace.commands.groups import show_help
from headrace.errors import EXIT_FAILURE, CommandError
from headrace.fast_imports import import_patiently, import_structlog


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns its exit code."""
    import_patiently()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    parser = build_parser(next((word for word in arguments if not word.startswith("-")), None))
    parsed = parser.parse_args(arguments)
    import_structlog()
    try:
        code: int = parsed.run(parsed)
    except CommandError as error:
        sys.stderr.write(f"{parsed.prog}: {error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE
    return code


def build_parser(command: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of the whole command line, in which only `command` has its flags and the commands below it."""
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
    for name, (about, add) in _COMMANDS.items():
        if name == command:
            add(commands, about)
        else:
            commands.add_parser(name, help=about)
    return parser


# Command → its line in the list of commands, and the function that adds it. In the order of that list.
_COMMANDS: dict[str, tuple[str, Callable[[Any, str], None]]] = {
    "up": ("run a whole deployment on this machine", add_up),
    "demo": ("see an answer survive the worker that writes it, in 15 seconds", add_demo),
    "chat": ("talk to a served model in the terminal", add_chat),
    "frontend": ("run an HTTP frontend", add_frontend),
    "worker": ("run an engine worker, or ask or tell running ones", add_worker),
    "router": ("run a router, or ask the routers", add_router),
    "submit": ("submit the lines of a file as jobs, and write their results", add_submit),
    "jobs": ("list, show, cancel or watch stored jobs", add_jobs),
    "trace": ("tell what happened to a request, when, where and why", add_trace),
    "top": ("watch workers, queues and streams live in the terminal", add_top),
    "console": ("serve the view of a deployment in a browser", add_console),
    "planner": ("say how many workers are needed soon, or start and drain them", add_planner),
    "doctor": ("check this machine, the NATS server and the running deployment", add_doctor),
    "keys": ("make, list, revoke and rotate the API keys of the HTTP frontends", add_keys),
    "audit": ("list or follow the records of requests, and say how long they are kept", add_audit),
    "tenant": ("export or delete all that is stored of a tenant", add_tenant),
    "init": ("make the logins of a deployment for a nats-server of your own", add_init),
    "steward": ("keep streams and make consumers for parts that log in with a role", add_steward),
    "elector": ("have a cluster of NATS servers elect at once when one of them dies", add_elector),
    "streams": ("plan, apply, show or purge what Headrace keeps in NATS", add_streams),
    "bench": ("load a running server and report latencies, or replay a trace in virtual time", add_bench),
    "replay": ("rebuild the index of the past, or place its requests by another policy", add_replay),
    "dlq": ("list, show, run again or drop the requests that were taken out of service", add_dlq),
    "chaos": ("kill, freeze and drain the parts of a deployment under load, and account for every request", add_chaos),
    "model": ("list or forget the models that are known, prepare the bundled one", add_model),
    "adapter": ("push LoRA adapters into the deployment, list or remove them", add_adapter),
    "config": ("show the settings in force and where each comes from", add_config),
    "completion": ("print the completion script of a shell", add_completion),
    "version": ("show versions of Headrace, NATS and the installed engines", add_version),
}


def command_names() -> list[str]:
    """Return the names of all commands."""
    return list(_COMMANDS)
