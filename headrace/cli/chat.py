"""Adds `headrace chat` to the command line."""

from __future__ import annotations

import argparse
from typing import Any

from headrace.config.flags import add_setting_flags, read_settings

EXAMPLES = """examples:
  headrace chat
  headrace chat --model Qwen/Qwen3-0.6B --system 'Answer in one sentence.'
  headrace chat 'Why is the sky blue?'
  git diff | headrace chat 'Write a commit message:'

Lines that begin with / are commands: /help lists them. Ctrl-C ends an answer, Ctrl-D the chat. Without a terminal one answer
is printed. A key is read from HEADRACE_API_KEY."""


def add_chat(commands: Any, about: str) -> None:
    """Add `chat`."""
    parser = commands.add_parser(
        "chat",
        help=about,
        description="Talk to a served model. Reaches the deployment that runs with the data folder, or the one at --url.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("text", metavar="TEXT", nargs="?", default="", help="ask only this, and print the answer")
    parser.add_argument("--url", metavar="URL", help="address of the frontend (default: that of the running `headrace up`)")
    parser.add_argument("--model", metavar="NAME", help="model to talk to (default: the first one)")
    parser.add_argument("--system", metavar="TEXT", default="", help="what the model is told first")
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run, prog="headrace chat")


def _run(parsed: argparse.Namespace) -> int:
    from headrace.chat.run import run_chat

    data_dir = read_settings(parsed, "control")["data_dir"]
    return run_chat(data_dir, url=parsed.url, model=parsed.model, system=parsed.system, text=parsed.text)
