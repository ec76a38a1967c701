"""Runs `headrace submit`: the lines of a file as jobs, their results as lines of another, going on where it was stopped.

Each line is a job whose id is made of the file's digest and the line's number, so the same file submitted again is the same
jobs: what has a result in the output is skipped, what runs is waited for, what was never stored is stored.
"""

from __future__ import annotations

import hashlib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import msgspec

from headrace.base.errors import EXIT_FAILURE, EXIT_OK, CommandError
from headrace.broker.durable.names import job_token
from headrace.client.client import Client, ClientOptions, client_of
from headrace.client.errors import ClientError, NotAllowed
from headrace.client.requests import Priority, Request
from headrace.client.results import Result
from headrace.commands.operating.control_client import connected
from headrace.commands.progress import Progress
from headrace.config.settings import Settings
from headrace.jetstream.client import Connection
from headrace.jetstream.subjects import Subjects

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
    """Submit what has no result yet, and return how many lines have no answer."""
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
    """Return the `id` of a job's line in the output."""
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
