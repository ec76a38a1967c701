"""The `headrace` command line.

Flags come from the table of settings; each command imports what it runs only when it runs, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from typing import Any

from headrace.catalogue import Command, Setting, settings_of
from headrace.errors import EXIT_FAILURE, CommandError
from headrace.settings import Settings, load

_SECTIONS = {
    "nats": "NATS connection",
    "log": "logging",
    "server": "embedded NATS server",
    "up": "supervision",
    "frontend": "HTTP frontend",
    "worker": "worker and engine",
    "router": "router",
}

_EXIT_CODES = """exit codes: 0 clean, 1 failure, 69 NATS server unreachable, 70 engine died, 78 wrong settings"""

_MAIN = f"""examples:
  headrace up                                     the bundled small model on http://127.0.0.1:8000
  headrace up --engine sim --workers 2            the simulator: no model, ready at once
  headrace up --model Qwen/Qwen3-0.6B --port 9000
  headrace frontend --nats nats://broker:4222     one part alone, on any machine
  headrace worker --engine vllm --model M --nats nats://broker:4222
  headrace router --nats nats://broker:4222
  headrace streams status

Every setting is a flag, an environment variable HEADRACE_… or a key of a TOML file (--config, HEADRACE_CONFIG or
./headrace.toml), in this order; `headrace config` shows what is in force. Durations are seconds.

{_EXIT_CODES}"""

_UP = """examples:
  headrace up
  headrace up --engine sim --workers 4 --port 0
  headrace up --model ./my-model --engine-arg max_model_len=4096 --engine-arg enforce_eager=true
  headrace up --nats nats://broker:4222           with an existing NATS server

Runs nats-server, one frontend and the workers as processes of their own and restarts what crashes. Ctrl-C stops all of
them and lets workers finish first; a second Ctrl-C kills them. <data-dir>/run/up.json says what runs where."""

_FRONTEND = """example:
  headrace frontend --nats nats://broker:4222 --host 0.0.0.0 --port 8000

SIGTERM finishes running answers first; a second one, or Ctrl-C, stops at once."""

_WORKER = """examples:
  headrace worker --engine sim --nats nats://broker:4222
  headrace worker --engine vllm --model Qwen/Qwen3-0.6B --engine-arg gpu_memory_utilization=0.8
  headrace worker drain worker-1                  ask a worker anywhere to finish and leave

SIGTERM drains: no new work, running work is finished or handed over. A second one, or Ctrl-C, stops at once."""

_DRAIN = """example:
  headrace worker drain worker-1 --grace 120 --nats nats://broker:4222

Returns when the worker has accepted. Its process ends with code 0 when its work is done or handed over."""


_ROUTER = """examples:
  headrace router --nats nats://broker:4222       place the requests of all models
  headrace router --model Qwen/Qwen3-0.6B --window 4096
  headrace router status                          the routers that run, and what they hold
  headrace router explain REQUEST-ID              why a request is where it is

Any number of routers share the work; without one, workers place requests on themselves. SIGTERM finishes what is being
placed, gives the rest back and leaves; a second one, or Ctrl-C twice, stops at once."""

_EXPLAIN = """example:
  headrace router explain 68a1f0c2… --nats nats://broker:4222

The id is the one of the answer (`id` without its prefix `chatcmpl-` or `cmpl-`, which may stay). Asks every live router; each
remembers its last decisions only."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    first = arguments[:1]
    parser = build_parser(streams="streams" in first, bench="bench" in first, replay="replay" in first)
    parsed = parser.parse_args(arguments)
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


def build_parser(*, streams: bool = False, bench: bool = False, replay: bool = False) -> argparse.ArgumentParser:
    """The whole command line. `streams`, `bench`, `replay`: with the flags of that command, whose module is slow
    to import."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="LLM serving over NATS JetStream.",
        epilog=_MAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=lambda _parsed: _show_help(parser), prog="headrace")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    _add(commands, "up", _run_up, text="run a whole deployment on this machine", epilog=_UP)
    _add(commands, "frontend", _run_frontend, text="run an HTTP frontend", epilog=_FRONTEND)
    worker = _add(commands, "worker", _run_worker, text="run an engine worker, or drain one", epilog=_WORKER)
    _add_drain(worker)
    router = _add(commands, "router", _run_router, text="run a router, or ask the routers", epilog=_ROUTER)
    _add_router_questions(router)
    _add_streams(commands, complete=streams)
    _add_bench(commands, complete=bench)
    _add_replay(commands, complete=replay)
    _add_model(commands)
    _add_config(commands)
    _add_version(commands)
    return parser


def read_settings(parsed: argparse.Namespace, command: Command) -> Settings:
    """The settings of a parsed command line. Raises SettingsError."""
    given = vars(parsed)
    flags = {setting.key: given.get(setting.dest) for setting in settings_of(command)}
    return load(command, flags=flags, environ=os.environ, config=given.get("config"))


def add_setting_flags(parser: argparse.ArgumentParser, command: Command) -> None:
    """One flag for each setting of `command` that has one, grouped by section, and --config."""
    parser.add_argument(
        "--config",
        metavar="FILE",
        default=argparse.SUPPRESS,
        help="TOML file with settings (default: headrace.toml if it is there)",
    )
    groups: dict[str, Any] = {}
    for setting in settings_of(command):
        if not setting.flag:
            continue
        section = setting.key.partition(".")[0]
        if section in _SECTIONS and section not in groups:
            groups[section] = parser.add_argument_group(_SECTIONS[section])
        groups.get(section, parser).add_argument(setting.flag, **_flag_options(setting))


def _flag_options(setting: Setting) -> dict[str, Any]:
    shown = (
        f"{setting.help} [{_default_text(setting)}; {setting.env}]"
        if _default_text(setting)
        else f"{setting.help} [{setting.env}]"
    )
    # An absent flag leaves no attribute: defaults are the settings' business, and a nested command must not undo its parent's.
    options: dict[str, Any] = {"dest": setting.dest, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
    if setting.kind == "switch":
        return {**options, "action": argparse.BooleanOptionalAction}
    if setting.kind == "table":
        return {**options, "action": "append", "metavar": setting.metavar}
    metavar = setting.metavar or {
        "choice": "|".join(setting.choices),
        "seconds": "SECONDS",
        "integer": "N",
        "path": "PATH",
    }.get(setting.kind, "TEXT")
    return {**options, "metavar": metavar}


def _default_text(setting: Setting) -> str:
    if setting.default in (None, (), {}):
        return ""
    if setting.kind == "switch":
        return f"default: {'on' if setting.default else 'off'}"
    return f"default: {setting.default:g}" if setting.kind == "seconds" else f"default: {setting.default}"


# -- commands ----------------------------------------------------------------------------------------------------------------


def _add(
    commands: Any,
    name: Command,
    run: Callable[[argparse.Namespace], int],
    *,
    text: str,
    epilog: str,
) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=text,
        usage=f"headrace {name} [options]",
        description=text[0].upper() + text[1:] + ".",
        epilog=f"{epilog}\n\n{_EXIT_CODES}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=run, prog=f"headrace {name}")
    add_setting_flags(parser, name)
    return parser


def _add_drain(worker: argparse.ArgumentParser) -> None:
    actions = worker.add_subparsers(metavar="", title="other worker commands")
    drain = actions.add_parser(
        "drain",
        help="ask a worker to finish its work and leave",
        description="Ask a worker to stop claiming, to finish or hand over its work, and to leave.",
        epilog=_DRAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    drain.add_argument("worker", metavar="ID", help="id or name of the worker")
    drain.add_argument(
        "--grace",
        type=float,
        metavar="SECONDS",
        help="how long it may take to finish (default: the worker's own drain_grace_s)",
    )
    add_setting_flags(drain, "control")
    drain.set_defaults(run=_run_drain, prog="headrace worker drain")


def _add_router_questions(router: argparse.ArgumentParser) -> None:
    actions = router.add_subparsers(metavar="", title="other router commands")
    explain = actions.add_parser(
        "explain",
        help="say why a request was placed where it is",
        description="Ask all live routers about one request and show the candidates, their costs and the choice.",
        epilog=_EXPLAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    explain.add_argument("request", metavar="REQUEST-ID", help="id of the request")
    status = actions.add_parser(
        "status",
        help="show the routers that run",
        description="Show every live router, its pool and what it holds.",
        allow_abbrev=False,
    )
    for parser, run, name in ((explain, _run_explain, "explain"), (status, _run_router_status, "status")):
        parser.add_argument("--json", action="store_true", help="as JSON")
        add_setting_flags(parser, "control")
        parser.set_defaults(run=run, prog=f"headrace router {name}")


def _add_streams(commands: Any, *, complete: bool) -> None:
    if complete:
        from headrace.streams import add_parser

        add_parser(commands)
    else:
        commands.add_parser("streams", help="plan, apply, show or purge what Headrace keeps in NATS")


def _add_bench(commands: Any, *, complete: bool) -> None:
    if complete:
        from headrace.bench import add_parser

        add_parser(commands)
    else:
        commands.add_parser("bench", help="benchmarks that need neither a GPU nor a server")


def _add_replay(commands: Any, *, complete: bool) -> None:
    if complete:
        from headrace.replay import add_parser

        add_parser(commands)
    else:
        commands.add_parser("replay", help="rebuild the index of the past, or place its requests by another policy")


def _add_model(commands: Any) -> None:
    model = commands.add_parser("model", help="prepare the bundled model")
    model.set_defaults(run=lambda _parsed: _show_help(model), prog="headrace model")
    actions = model.add_subparsers(metavar="ACTION", title="actions")
    prepare = actions.add_parser(
        "prepare",
        help="download and convert the bundled small chat model, if that was not done yet",
        description="Make the bundled small chat model ready in <data-dir>/models and print its folder.",
        allow_abbrev=False,
    )
    add_setting_flags(prepare, "model")
    prepare.set_defaults(run=_run_model_prepare, prog="headrace model prepare")


def _add_config(commands: Any) -> None:
    config = commands.add_parser(
        "config",
        help="show the settings in force and where each comes from",
        description="Show the settings in force for a command, secrets masked, as TOML with the source of each value.",
        allow_abbrev=False,
    )
    config.add_argument(
        "command", nargs="?", choices=("up", "frontend", "worker", "router", "streams"), default="up", help="default: up"
    )
    config.add_argument("--config", metavar="FILE", default=argparse.SUPPRESS, help="TOML file with settings")
    config.add_argument("--json", action="store_true", help="as JSON: key → value and source")
    config.set_defaults(run=_run_config, prog="headrace config")


def _add_version(commands: Any) -> None:
    version = commands.add_parser(
        "version", help="show versions of Headrace, NATS and the installed engines", allow_abbrev=False
    )
    version.add_argument("--json", action="store_true", help="as JSON")
    version.set_defaults(run=_run_version, prog="headrace version")


def _show_help(parser: argparse.ArgumentParser) -> int:
    parser.print_help(sys.stderr)
    return 2


def _run_up(parsed: argparse.Namespace) -> int:
    from headrace.run import run_up

    return run_up(read_settings(parsed, "up"))


def _run_frontend(parsed: argparse.Namespace) -> int:
    from headrace.run import run_frontend

    return run_frontend(read_settings(parsed, "frontend"))


def _run_worker(parsed: argparse.Namespace) -> int:
    from headrace.run import run_worker

    return run_worker(read_settings(parsed, "worker"))


def _run_drain(parsed: argparse.Namespace) -> int:
    from headrace.control import drain_worker

    return drain_worker(read_settings(parsed, "control"), parsed.worker, grace_s=parsed.grace)


def _run_router(parsed: argparse.Namespace) -> int:
    from headrace.run import run_router

    return run_router(read_settings(parsed, "router"))


def _run_explain(parsed: argparse.Namespace) -> int:
    from headrace.explain import explain_request

    return explain_request(read_settings(parsed, "control"), parsed.request, as_json=parsed.json)


def _run_router_status(parsed: argparse.Namespace) -> int:
    from headrace.explain import show_routers

    return show_routers(read_settings(parsed, "control"), as_json=parsed.json)


def _run_model_prepare(parsed: argparse.Namespace) -> int:
    from headrace.run import run_model_prepare

    return run_model_prepare(read_settings(parsed, "model"))


def _run_config(parsed: argparse.Namespace) -> int:
    from headrace.show import show_config

    sys.stdout.write(show_config(read_settings(parsed, parsed.command), as_json=parsed.json))
    return 0


def _run_version(parsed: argparse.Namespace) -> int:
    from headrace.show import show_versions

    sys.stdout.write(show_versions(as_json=parsed.json))
    return 0
