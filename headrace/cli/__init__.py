"""The `headrace` command line.

Flags come from the table of settings; each command imports what it runs only when it runs, so that `--help` is instant.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from headrace.cli.chaos import add_chaos
from headrace.cli.dlq import add_dlq
from headrace.cli.help_texts import MAIN
from headrace.cli.parts import add_frontend, add_router, add_up, add_worker
from headrace.cli.tools import add_bench, add_config, add_model, add_replay, add_streams, add_version
from headrace.commands.groups import show_help
from headrace.errors import EXIT_FAILURE, CommandError
from headrace.fast_imports import import_patiently, import_structlog


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    import_patiently()
    arguments = sys.argv[1:] if arguments is None else list(arguments)
    first = arguments[:1]
    parser = build_parser(streams="streams" in first, bench="bench" in first, replay="replay" in first)
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


def build_parser(*, streams: bool = False, bench: bool = False, replay: bool = False) -> argparse.ArgumentParser:
    """The whole command line. `streams`, `bench`, `replay`: with the flags of that command, whose module is slow
    to import."""
    parser = argparse.ArgumentParser(
        prog="headrace",
        description="LLM serving over NATS JetStream.",
        epilog=MAIN,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.set_defaults(run=lambda _parsed: show_help(parser), prog="headrace")
    commands = parser.add_subparsers(metavar="COMMAND", title="commands")
    add_up(commands)
    add_frontend(commands)
    add_worker(commands)
    add_router(commands)
    add_streams(commands, complete=streams)
    add_bench(commands, complete=bench)
    add_replay(commands, complete=replay)
    add_dlq(commands)
    add_chaos(commands)
    add_model(commands)
    add_config(commands)
    add_version(commands)
    return parser
