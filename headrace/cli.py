"""The `headrace` command line: its parser, its help, shell completion, and commands from entry points."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from typing import Any, NoReturn, TypeVar

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, EXIT_USAGE, CommandError
from headrace.base.process import import_patiently, import_structlog
from headrace.commands.groups import EXIT_CODES, ShowVersion, show_help

_N = TypeVar("_N")

_OPTION = re.compile(r"--?[A-Za-z][\w-]*")
_LIKE = 0.6  # how similar, from 0 to 1, what was meant must be


class CommandParser(argparse.ArgumentParser):
    """A parser whose errors are one line with the nearest option or command, and end the process with code 2.

    The parsers of the commands below it are of the same class.
    """

    def parse_known_args(  # type: ignore[override]  # the stub has an overload for each kind of namespace
        self, args: Sequence[str] | None = None, namespace: _N | None = None
    ) -> tuple[_N | argparse.Namespace, list[str]]:
        """Parse, and take nothing that is unknown: each command knows its own options best."""
        words = sys.argv[1:] if args is None else list(args)
        self._refuse_unknown(self._own_words(words))
        found, left = super().parse_known_args(words, namespace)
        if left:
            self._refuse_unknown(left)
            self.error(f"unexpected argument {left[0][:200]!r}")
        return found, left

    def error(self, message: str) -> NoReturn:
        """Print the error and how to list the commands, and exit with code 2."""
        command = self.prog.replace(" [options]", "")
        sys.stderr.write(f"{command}: {message.removeprefix('argument ')} ({command} --help)\n")
        sys.exit(EXIT_USAGE)

    def below(self) -> dict[str, argparse.ArgumentParser]:
        found: dict[str, argparse.ArgumentParser] = {}
        for action in self._actions:
            if action.nargs == argparse.PARSER and isinstance(action.choices, dict):
                found |= action.choices
        return found

    def options(self) -> dict[str, argparse.Action]:
        shown = self._option_string_actions.items()
        return {name: action for name, action in shown if action.help != argparse.SUPPRESS}

    def _own_words(self, words: Sequence[str]) -> list[str]:
        """Return the words before the command below this one, whose options are its own."""
        below = self._commands_below()
        own: list[str] = []
        for word in words:
            if word == "--" or word in below:
                break
            own.append(word)
        return own

    def _refuse_unknown(self, words: Iterable[str]) -> None:
        known = self._option_string_actions
        for word in words:
            name = word.partition("=")[0]
            if not _OPTION.fullmatch(name) or name in known or (name[:2] in known and not name.startswith("--")):
                continue
            self.error(f"there is no option {name[:200]}{_meant(name, known)}")

    def _commands_below(self) -> Collection[str]:
        return [str(name) for action in self._actions if action.nargs == argparse.PARSER for name in action.choices or ()]

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is None or value in action.choices:
            return
        choices = [str(choice) for choice in action.choices]
        if action.nargs == argparse.PARSER:
            raise argparse.ArgumentError(None, f"there is no command {str(value)[:200]!r}{_meant(str(value), choices)}")
        raise argparse.ArgumentError(
            action, f"expected one of {', '.join(choices)}, got {str(value)[:200]!r}{_meant(str(value), choices)}"
        )


def _meant(name: str, known: Iterable[str]) -> str:
    import difflib

    found = difflib.get_close_matches(name, [word for word in known if not word.startswith("--no-")], n=1, cutoff=_LIKE)
    return f"; did you mean {found[0]}?" if found else ""


# The `headrace` command line.
#
# Flags are derived from the declared settings, and only the command that is asked for gets its flags: to make those of all
# commands takes longer than everything else here. A command imports the code that it runs only when it runs.

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
    if "_ARGCOMPLETE" in os.environ:
        _complete()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    prog = "headrace"
    try:
        parsed = build_parser(next((word for word in arguments if not word.startswith("-")), None)).parse_args(arguments)
        prog = parsed.prog
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
            import_structlog()  # before the modules of a command import it with rich
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
    "up": ("run a whole deployment on this machine", "headrace.commands.parts:add_up"),
    "demo": ("see an answer survive the worker that writes it, in 15 seconds", "headrace.demo:add_demo"),
    "chat": ("talk to a served model in the terminal", "headrace.chat:add_chat"),
    "frontend": ("run an HTTP frontend", "headrace.commands.parts:add_frontend"),
    "worker": ("run an engine worker, or ask or tell running ones", "headrace.commands.parts:add_worker"),
    "router": ("run a router, or ask the routers", "headrace.commands.parts:add_router"),
    "submit": ("submit the lines of a file as jobs, and write their results", "headrace.commands.jobs:add_submit"),
    "jobs": ("list, show, cancel or watch stored jobs", "headrace.commands.jobs:add_jobs"),
    "trace": ("tell what happened to a request, when, where and why", "headrace.commands.trace:add_trace"),
    "top": ("watch workers, queues and streams live in the terminal", "headrace.top:add_top"),
    "console": ("serve the view of a deployment in a browser", "headrace.console.app:add_console"),
    "planner": ("say how many workers are needed soon, or start and drain them", "headrace.planner.command:add_planner"),
    "doctor": ("check this machine, the NATS server and the running deployment", "headrace.doctor:add_doctor"),
    "keys": ("make, list, revoke and rotate the API keys of the HTTP frontends", "headrace.commands.keys:add_keys"),
    "audit": ("list or follow the records of requests, and say how long they are kept", "headrace.commands.audit:add_audit"),
    "tenant": ("export or delete all that is stored of a tenant", "headrace.commands.tenant:add_tenant"),
    "init": ("make the logins of a deployment for a nats-server of your own", "headrace.commands.logins:add_init"),
    "steward": ("keep streams and make consumers for parts that log in with a role", "headrace.commands.logins:add_steward"),
    "streams": ("plan, apply, show or purge what Headrace keeps in NATS", "headrace.commands.streams:add_parser"),
    "bench": (
        "load a running server and report latencies, or replay a trace in virtual time",
        "headrace.tools.bench.compare:add_bench",
    ),
    "replay": ("rebuild the index of the past, or place its requests by another policy", "headrace.commands.replay:add_parser"),
    "dlq": ("list, show, run again or drop the requests that were taken out of service", "headrace.commands.dlq:add_dlq"),
    "chaos": (
        "kill, freeze and drain the parts of a deployment under load, and account for every request",
        "headrace.tools.chaos.run:add_chaos",
    ),
    "model": ("list or forget the models that are known, prepare the bundled one", "headrace.commands.info:add_model"),
    "adapter": ("push LoRA adapters into the deployment, list or remove them", "headrace.commands.adapter:add_adapter"),
    "config": ("show the settings in force and where each comes from", "headrace.commands.info:add_config"),
    "completion": ("print the completion script of a shell", "headrace.cli:add_completion"),
    "version": ("show versions of Headrace, NATS and the installed engines", "headrace.commands.info:add_version"),
}


def command_names() -> list[str]:
    return [*_COMMANDS, *installed_commands()]


EXAMPLES = """examples:
  source <(headrace completion bash)      in this shell, or in ~/.bashrc for all
  headrace completion bash > ~/.local/share/bash-completion/completions/headrace
  headrace completion zsh > ~/.zfunc/_headrace                  a folder of $fpath
  headrace completion fish > ~/.config/fish/completions/headrace.fish"""


def add_completion(commands: Any, about: str) -> None:
    parser = commands.add_parser(
        "completion",
        help=about,
        description="Print a script that completes commands, options and their values in a shell.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("shell", choices=("bash", "zsh", "fish"), help="the shell")
    parser.set_defaults(run=_run, prog="headrace completion")


def _run(parsed: argparse.Namespace) -> int:
    from argcomplete.shell_integration import shellcode

    sys.stdout.write(shellcode(["headrace"], shell=parsed.shell) + "\n")
    return EXIT_OK


def _complete() -> None:
    """Print the words that may come next for the shell that asks, by the variables of argcomplete, and end the process."""
    import argcomplete
    from argcomplete.completers import ChoicesCompleter

    words = os.environ.get("COMP_LINE", "").split()[1:]
    parser = build_parser(next((word for word in words if not word.startswith("-")), None))
    for action in _options(parser):
        if values := _values(action):
            completer = ChoicesCompleter(dict.fromkeys(values, ""))
            action.completer = completer  # type: ignore[attr-defined]  # argcomplete looks for it there
    argcomplete.autocomplete(parser)


def _options(parser: argparse.ArgumentParser) -> Iterator[argparse.Action]:
    if isinstance(parser, CommandParser):
        yield from parser.options().values()
        for below in parser.below().values():
            yield from _options(below)


def _values(action: argparse.Action) -> tuple[str, ...]:
    """Return the values in a metavar `a|b`, as settings have it."""
    parts = str(action.metavar or "").split("|")
    return tuple(part for part in parts if re.fullmatch(r"[a-z0-9][a-z0-9._-]*", part)) if len(parts) > 1 else ()
