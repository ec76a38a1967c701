"""Adds `headrace console` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.config.flags import add_setting_flags

EXAMPLES = """examples:
  headrace console                                beside a running `headrace up`, in its folder
  headrace console --nats nats://broker:4222 --frontend http://gateway:8000
  HEADRACE_CONSOLE_KEY=… headrace console --console-host 0.0.0.0

`headrace up` serves one already (--no-console: none). The link that is printed holds the admin key; without it the console only
shows, and where other machines reach it, or NATS asks for a login, it shows nothing."""


def add_console(commands: Any, about: str) -> None:
    """Add `console`."""
    parser = commands.add_parser(
        "console",
        help=about,
        description="Serve the console: a deployment in a browser, live, at /console.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_setting_flags(parser, "console")
    parser.set_defaults(run=_run, prog="headrace console")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.commands.running_deployment import located_settings
    from headrace.console.command import run_console_command

    return run_console_command(located_settings(parsed, "console"))
