"""Adds `headrace submit` and `headrace jobs` to the command line."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from headrace.commands.groups import add_group
from headrace.commands.running_deployment import located_settings
from headrace.config.flags import add_setting_flags

SUBMIT_EXAMPLES = """examples:
  headrace submit questions.jsonl --out answers.jsonl
  headrace submit questions.jsonl --out answers.jsonl --request-model Qwen/Qwen3-0.6B --open 1000

exit codes: 0 every line has an answer, 1 some have an error; both are in the output"""

JOBS_EXAMPLES = """examples:
  headrace jobs ls
  headrace jobs show greeting
  headrace jobs cancel greeting
  headrace jobs watch greeting"""

_TENANT = "the tenant that the jobs belong to (default: none)"


def add_submit(commands: Any, about: str) -> None:
    """Add `headrace submit`."""
    submit = commands.add_parser(
        "submit",
        help=about,
        description="Submit each line of a file as a job, and write each result as a line. The same command goes on where it "
        "was stopped.",
        epilog=SUBMIT_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = submit.add_argument
    add("file", type=Path, metavar="FILE", help="JSON lines: request bodies, or lines of an OpenAI batch file")
    add("--out", type=Path, required=True, metavar="FILE", help="results, as lines of an OpenAI output file, in no order")
    add("--request-model", metavar="MODEL", dest="request_model", help="the model of all lines, in place of their own")
    add("--endpoint", default="/v1/chat/completions", metavar="PATH", help="of lines that are bodies (default: %(default)s)")
    add("--priority", choices=("batch", "std", "hi"), default="batch", help="batch takes what others leave (default)")
    add("--deadline", type=float, metavar="SECONDS", help="for each job, from when it is submitted (default: a day)")
    add("--open", type=int, default=256, metavar="N", help="jobs that are open at once (default: 256)")
    add("--tenant", default="_", metavar="NAME", help=_TENANT)
    add("--again", default="", metavar="WORD", help="new jobs for a file that was submitted before, under this name")
    add_setting_flags(submit, "control")
    submit.set_defaults(run=_run_submit, prog="headrace submit")


def add_jobs(commands: Any, about: str) -> None:
    """Add `headrace jobs` and its actions."""
    actions = add_group(
        commands, "jobs", about=about, description="Jobs that are stored, and their results.", examples=JOBS_EXAMPLES
    )
    ls = _add(actions, "ls", _run_ls, "list the jobs that have not ended, and the latest results")
    ls.add_argument("--limit", type=int, default=100, metavar="N", help="of each (default: 100)")
    ls.add_argument("--json", action="store_true", help="as JSON")
    show = _add(actions, "show", _run_show, "show the result of a job, as JSON")
    show.add_argument("job", metavar="JOB", help="its id")
    cancel = _add(actions, "cancel", _run_cancel, "end jobs unless they have ended, and print how they ended")
    cancel.add_argument("jobs", metavar="JOB", nargs="+", help="its id")
    watch = _add(actions, "watch", _run_watch, "print what happens to a job until it has ended, or to all jobs")
    watch.add_argument("job", metavar="JOB", nargs="?", help="its id (default: all jobs of the tenant)")


def _add(actions: Any, name: str, run: Callable[[argparse.Namespace], int], text: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = actions.add_parser(
        name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False
    )
    parser.add_argument("--tenant", default="_", metavar="NAME", help=_TENANT)
    add_setting_flags(parser, "control")
    parser.set_defaults(run=run, prog=f"headrace jobs {name}")
    return parser


def _run_submit(parsed: argparse.Namespace) -> int:
    from headrace.base.errors import CommandError
    from headrace.commands.submit import SubmitOptions, submit_file

    if parsed.open < 1:
        raise CommandError(f"--open must be 1 or more, got {parsed.open}")
    options = SubmitOptions(
        source=parsed.file,
        out=parsed.out,
        tenant=parsed.tenant,
        model=parsed.request_model,
        endpoint=parsed.endpoint,
        priority=parsed.priority,
        deadline_s=parsed.deadline,
        window=parsed.open,
        again=parsed.again,
    )
    return submit_file(located_settings(parsed), options)


def _run_ls(parsed: argparse.Namespace) -> int:
    from headrace.commands.jobs import list_jobs

    return list_jobs(located_settings(parsed), tenant=parsed.tenant, limit=parsed.limit, as_json=parsed.json)


def _run_show(parsed: argparse.Namespace) -> int:
    from headrace.commands.jobs import show_job

    return show_job(located_settings(parsed), parsed.job, tenant=parsed.tenant)


def _run_cancel(parsed: argparse.Namespace) -> int:
    from headrace.commands.jobs import cancel_jobs

    return cancel_jobs(located_settings(parsed), parsed.jobs, tenant=parsed.tenant)


def _run_watch(parsed: argparse.Namespace) -> int:
    from headrace.commands.jobs import watch_jobs

    return watch_jobs(located_settings(parsed), parsed.job, tenant=parsed.tenant)
