"""The commands `headrace submit` and `headrace jobs`."""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import os
import sys
import time
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import IO, Any, TypeVar

import msgspec

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.broker.durable.names import job_token
from headrace.broker.messages.durable import JobProgress
from headrace.client.client import Client, ClientOptions, ListedJob, Priority, Request, client_of
from headrace.client.errors import ClientError, NotAllowed, UnknownJob
from headrace.client.results import Result
from headrace.commands.control import announce, columns, connected, located_settings
from headrace.commands.groups import add_group
from headrace.commands.progress import Progress
from headrace.config.build_settings import add_setting_flags
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.ports import Message
from headrace.jetstream.subjects import Subjects

T = TypeVar("T")
_EVENTS = 1024  # that may wait to be printed


def _client(connection: Connection, names: Subjects, tenant: str) -> Client:
    return client_of(connection, names, ClientOptions(tenant=tenant, prefix=names.prefix))


def _connected(settings: Settings, ask: Callable[[Connection, Subjects], Awaitable[T]]) -> T:
    """Run `ask` with a connection. Raises CommandError also for what the login of a tenant cannot do."""
    try:
        return connected(settings, ask, name="headrace jobs")
    except NotAllowed as error:
        raise CommandError(str(error)) from None


def list_jobs(settings: Settings, *, tenant: str, limit: int, as_json: bool) -> int:
    async def ask(connection: Connection, names: Subjects) -> list[ListedJob]:
        return await _client(connection, names, tenant).jobs(limit=limit)

    found = _connected(settings, ask)
    if as_json:
        sys.stdout.write(json.dumps([msgspec.to_builtins(job) for job in found], indent=1) + "\n")
        return EXIT_OK
    head = ["job", "status", "class", "endpoint", "batch", "stored", "ended"]
    sys.stdout.write(columns([head, *map(_row, found)]) if found else "there are no jobs\n")
    return EXIT_OK


def show_job(settings: Settings, job: str, *, tenant: str) -> int:
    """Run `headrace jobs show`. Raises CommandError for a job without a result."""

    async def ask(connection: Connection, names: Subjects) -> str:
        client = _client(connection, names, tenant)
        result = await client.peek(job)
        if result is not None:
            return json.dumps(
                {"status": result.status, "tokens": msgspec.to_builtins(result.tokens), **result.line()}, indent=1
            )
        if await client.is_open(job):
            raise CommandError(f"job {job!r} has not ended: headrace jobs watch {job}")
        raise CommandError(f"there is no job {job!r} of this tenant, and no result of one")

    sys.stdout.write(_connected(settings, ask) + "\n")
    return EXIT_OK


def cancel_jobs(settings: Settings, jobs: Sequence[str], *, tenant: str) -> int:
    """Run `headrace jobs cancel`. Raises CommandError for the first job that is not known."""

    async def cancel(connection: Connection, names: Subjects) -> list[str]:
        client = _client(connection, names, tenant)
        try:
            ended: list[str] = [await client.cancel(job) for job in jobs]
            announce(connection, names, "jobs cancel", tenant=client.tenant, jobs=list(jobs))
            return ended
        except UnknownJob as error:
            raise CommandError(str(error)) from None

    for job, status in zip(jobs, _connected(settings, cancel), strict=True):
        sys.stdout.write(f"{job}  {status}\n")
    return EXIT_OK


def watch_jobs(settings: Settings, job: str | None, *, tenant: str) -> int:
    """Run `headrace jobs watch`: print what happens, of one job until it has ended."""

    async def watch(connection: Connection, names: Subjects) -> int:
        client = _client(connection, names, tenant)
        events: asyncio.Queue[Message] = asyncio.Queue(_EVENTS)
        subject = names.job_events(client.tenant, "x").rpartition(".")[0]

        def on_event(message: Message) -> None:
            if not events.full():  # a screen that is too slow misses some, as core subscribers do
                events.put_nowait(message)

        await connection.subscribe(f"{subject}.{job_token(job) if job else '*'}", on_event)
        printing = asyncio.ensure_future(_print(events))
        try:
            if job is None:
                await printing
                return EXIT_OK
            async with client.reading():
                result = await client.result(job)
        finally:
            printing.cancel()
        sys.stdout.write(f"{_now()}  {job}  ended: {result.status}{': ' + result.error if result.error else ''}\n")
        return EXIT_OK if result.ok else EXIT_FAILURE

    return _connected(settings, watch)


async def _print(events: asyncio.Queue[Message]) -> None:
    while True:
        message = await events.get()
        try:
            event = msgspec.json.decode(message.data, type=JobProgress)
        except msgspec.DecodeError:
            continue
        told = f"{event.tokens} tokens" if event.event == "progress" else event.status or event.carrier
        sys.stdout.write(f"{_now()}  {event.id}  {event.event}  {told}\n")
        sys.stdout.flush()


def _now() -> str:
    return time.strftime("%H:%M:%S")


def _row(job: ListedJob) -> list[str]:
    return [job.id, job.status or "open", job.request_class, job.endpoint, job.batch, _when(job.stored), _when(job.finished)]


def _when(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat(timespec="seconds").replace("+00:00", "Z") if at else ""


# Runs `headrace submit`: the lines of a file as jobs, their results as lines of another, going on where it was stopped.
#
# Each line is a job whose id is made of the file's digest and the line's number, so the same file submitted again is the same
# jobs: what has a result in the output is skipped, what runs is waited for, what was never stored is stored.

MOST_LINE_BYTES = 1_000_000  # a line is one message


@dataclass(frozen=True, slots=True, kw_only=True)
class SubmitOptions:
    """Options of `headrace submit`. `again` makes new jobs of a file that was submitted before."""

    source: Path
    out: Path
    tenant: str
    model: str | None
    endpoint: str
    priority: Priority
    deadline_s: float | None
    window: int
    again: str


def submit_file(settings: Settings, options: SubmitOptions) -> int:
    """Run `headrace submit`. Raises CommandError; then the same command goes on where it stopped."""
    total, digest = check_file(options.source)
    done = keep_whole_lines(options.out)
    prefix = f"{digest[:16]}{options.again}"

    async def run(connection: Connection, names: Subjects) -> int:
        wanted = ClientOptions(tenant=options.tenant, prefix=names.prefix, window=options.window)
        try:
            client = client_of(connection, names, wanted)
            async with client.reading():
                return await _submit(client, options, total, done, prefix)
        except NotAllowed as error:
            raise CommandError(str(error)) from error
        except ClientError as error:
            raise CommandError(f"{error}; run the same command again to go on") from error

    failed = connected(settings, run, name="headrace submit")
    return EXIT_FAILURE if failed else EXIT_OK


async def _submit(client: Client, options: SubmitOptions, total: int, done: Mapping[str, bool], prefix: str) -> int:
    """Submit the lines without a result, and return how many have no answer."""
    failed = 0
    before = 0

    def wanted() -> Iterator[Request]:
        nonlocal failed, before
        for number, line in lines_of(options.source):
            request = request_of(line, number, prefix, options)
            known = done.get(line_id(request.id))
            if known is None:
                yield request
            else:
                before += 1
                failed += not known
                bar.update()

    with options.out.open("ab") as out, Progress(total, "lines") as bar:
        async for result in client.submit_all(wanted()):
            _write(out, result)
            failed += not result.ok
            bar.update(failed=failed)
    sys.stderr.write(f"{total} lines: {total - failed} answered, {failed} failed, {before} of them before; {options.out}\n")
    return failed


def _write(out: IO[bytes], result: Result) -> None:
    out.write(msgspec.json.encode(result.line()) + b"\n")
    out.flush()


def line_id(job: str) -> str:
    return f"batch_req_{job_token(job)}"


def request_of(line: Mapping[str, Any], number: int, prefix: str, options: SubmitOptions) -> Request:
    """Return the job of a line: a line of a batch file, or the body of a request."""
    body, endpoint = line, options.endpoint
    custom_id = f"line-{number}"
    if isinstance(line.get("body"), dict) and "url" in line:
        body, endpoint, custom_id = line["body"], str(line["url"]), str(line.get("custom_id") or custom_id)
    if options.model is not None:
        body = {**body, "model": options.model}
    return Request(
        body=body,
        id=f"{prefix}-{number}",
        endpoint=endpoint,
        priority=options.priority,
        deadline_s=options.deadline_s,
        custom_id=custom_id,
    )


def lines_of(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Return the lines of a file with their numbers, from 1; empty ones are left out. Raises CommandError naming the line."""
    with path.open("rb") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            if len(line) > MOST_LINE_BYTES:
                raise CommandError(f"{path}, line {number}: {len(line)} bytes; a job has at most {MOST_LINE_BYTES}")
            try:
                yield number, msgspec.json.decode(line, type=dict[str, Any])
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise CommandError(f"{path}, line {number}: no JSON object: {error}") from None


def check_file(path: Path) -> tuple[int, str]:
    """Read a whole file before anything is submitted. Returns its number of jobs and its digest. Raises CommandError."""
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
        total = sum(1 for _ in lines_of(path))
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    if not total:
        raise CommandError(f"{path} has no lines")
    return total, digest.hexdigest()


def keep_whole_lines(path: Path) -> dict[str, bool]:
    """Return which jobs the output has, and whether each was answered. A last line that was cut off is removed.

    Raises CommandError for a file that is no output of this command.
    """
    done: dict[str, bool] = {}
    try:
        with path.open("rb+") as file:
            whole = 0
            for number, line in enumerate(file, start=1):
                if not line.endswith(b"\n"):
                    break
                try:
                    found = msgspec.json.decode(line)
                    response = found["response"]
                    done[found["id"]] = response is not None and response["status_code"] < 300
                except (msgspec.DecodeError, KeyError, TypeError):
                    raise CommandError(f"{path}, line {number}, is no result: give another file with --out") from None
                whole += len(line)
            if whole < os.fstat(file.fileno()).st_size:
                file.truncate(whole)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise CommandError(f"cannot read {path}: {error.strerror}") from None
    return done


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

    return list_jobs(located_settings(parsed), tenant=parsed.tenant, limit=parsed.limit, as_json=parsed.json)


def _run_show(parsed: argparse.Namespace) -> int:

    return show_job(located_settings(parsed), parsed.job, tenant=parsed.tenant)


def _run_cancel(parsed: argparse.Namespace) -> int:

    return cancel_jobs(located_settings(parsed), parsed.jobs, tenant=parsed.tenant)


def _run_watch(parsed: argparse.Namespace) -> int:

    return watch_jobs(located_settings(parsed), parsed.job, tenant=parsed.tenant)
