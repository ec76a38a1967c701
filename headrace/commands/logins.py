"""The commands `headrace init` and `headrace steward`: logins for a nats-server that is run by others."""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.base import logs
from headrace.base.errors import EXIT_OK, CommandError, StartFailed
from headrace.base.process import stop_signals
from headrace.commands.control import located_settings
from headrace.commands.run import exit_code
from headrace.config.build_settings import add_setting_flags, read_settings, subjects
from headrace.config.settings import Settings
from headrace.jetstream.context import DEFAULT_URL
from headrace.jetstream.errors import JetStreamError
from headrace.jetstream.logins.jwt_accounts import CREDENTIALS, operator_config
from headrace.jetstream.logins.nkey_logins import CARD_KEY, CONTEXT, accounts_config, make_keys, write_context
from headrace.jetstream.logins.roles import Login
from headrace.jetstream.subjects import pool_id, tenant_token
from headrace.jetstream.topology import Topology
from headrace.up.nats_part import Provisioner
from headrace.up.server_logins import tls_files

CONFIG = "accounts.conf"


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """The models, tenants and workers that get logins, beside the roles. `workers`: ids of single workers of the one model."""

    models: Sequence[str] = ()
    tenants: Sequence[str] = ()
    workers: Sequence[str] = ()


def run_init(settings: Settings, folder: Path, whom: Wanted, *, jwt: bool) -> int:
    """Write seeds, contexts and the accounts into a folder, and print what to do with them. Raises CommandError.

    With `jwt` accounts and users are JSON web tokens, for a server in operator mode.
    """
    topology = Topology(subjects(settings))
    url = ",".join(settings["nats.url"]) or DEFAULT_URL
    tls = tls_files(settings)
    try:
        wanted = logins(whom, namespace=settings["namespace"])
        config = operator_config(topology, folder, wanted) if jwt else accounts_config(topology, make_keys(folder, wanted))
        for login in wanted:
            credentials = login.name + CREDENTIALS if jwt else None
            write_context(folder, login, url=url, prefix=settings["prefix"], tls=tls, credentials=credentials)
    except JetStreamError as error:
        failure = StartFailed(str(error))
        failure.exit_code = exit_code(error)
        raise failure from None
    path = folder / CONFIG
    try:
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            file.write(config)
    except OSError as error:
        raise CommandError(f"{path} cannot be written: {error.strerror}") from None
    sys.stdout.write(_what_next(folder, wanted))
    return EXIT_OK


def logins(whom: Wanted, *, namespace: str) -> list[Login]:
    """Return the logins of a deployment: of the workers of each model, or of all where none is named, and of each tenant.

    Single workers have a login beside that of their pool. Raises CommandError where their model is not said.
    """
    workers = [Login("worker", pool_id(model, namespace)) for model in whom.models] or [Login("worker")]
    if whom.workers and len(workers) > 1:
        raise CommandError(f"--worker {whom.workers[0]}: of which model? Give one --model with it")
    workers += [Login("worker", workers[0].scope, worker) for worker in whom.workers]
    batches = [Login("batch", tenant_token(tenant)) for tenant in whom.tenants]
    others = [Login("operator"), Login("ingress"), Login("router"), Login("planner"), Login("console")]
    return sorted({*others, *workers, *batches})


def _what_next(folder: Path, wanted: Sequence[Login]) -> str:
    contexts = {login.role: folder / (login.name + CONTEXT) for login in reversed(wanted)}
    lines = [
        f"{len(wanted)} logins are in {folder}: {', '.join(login.name for login in wanted)}.",
        "",
        f"1. Have nats-server read the accounts: add  include {CONFIG}  to its configuration, beside that file,",
        "   and restart it: first accounts that come by a reload have no JetStream. For logins added later a reload will do.",
        "   That server encrypts what it stores only if it is told to: docs/deployment.md, Encryption on the disk.",
        "2. Keep running, as the operator:",
        f"     headrace steward --nats-context {contexts['operator']}",
        f"3. Give each part its own context and seed, and no other one; frontends and workers also {CARD_KEY}:",
        f"     headrace frontend --nats-context {contexts['ingress']}",
        f"     headrace router --nats-context {contexts['router']}",
        f"     headrace worker --nats-context {contexts['worker']}",
    ]
    return "\n".join(lines) + "\n"


# Runs `headrace steward`: keeps the streams of a deployment, and makes the consumers of parts that may not make them.


def run_steward(settings: Settings) -> int:
    """Run until a stop signal. Raises StartFailed when the login is not an operator's or no server answers."""
    logs.configure(log_format=settings["log.format"], level=settings["log.level"], fields={"component": "steward"})
    return asyncio.run(_run(settings))


async def _run(settings: Settings) -> int:
    provisioner, stopping = Provisioner(), asyncio.Event()
    with stop_signals(stopping.set, stopping.set):
        await provisioner.start(settings)
        sys.stdout.write("the steward answers; Ctrl-C ends it\n")
        sys.stdout.flush()
        try:
            await stopping.wait()
        finally:
            await provisioner.stop()
    return EXIT_OK


INIT = """example:
  headrace init --out logins --model Qwen/Qwen3-0.6B --tenant acme --nats nats://broker:4222

Seeds that are in the folder stay, so the same command with one more --model or --tenant adds a login. The folder holds the keys
to the deployment: give each part its own two files (NAME.nk, NAME.json) and nothing else."""


def add_init(commands: Any, about: str) -> None:
    parser = commands.add_parser(
        "init",
        help=about,
        description="Make the logins of a deployment for a nats-server of your own: seeds, contexts, and the accounts with "
        "their permissions for its configuration.",
        epilog=INIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="folder for the files")
    parser.add_argument(
        "--model",
        action="append",
        default=[],
        metavar="NAME",
        help="a model whose workers get their own login; repeatable",
    )
    parser.add_argument("--tenant", action="append", default=[], metavar="NAME", help="a tenant that stores jobs; repeatable")
    parser.add_argument(
        "--worker",
        action="append",
        default=[],
        metavar="ID",
        help="an id for one start of a worker of the model, with a login of its own; repeatable",
    )
    parser.add_argument(
        "--jwt", action="store_true", help="accounts and users as JSON web tokens, for a nats-server in operator mode"
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run_init, prog="headrace init")


def add_steward(commands: Any, about: str) -> None:
    parser = commands.add_parser(
        "steward",
        help=about,
        description="Make the streams of a deployment, as its operator, and the consumers that its parts ask for. `headrace "
        "up` does this for its own server.",
        allow_abbrev=False,
    )
    add_setting_flags(parser, "control")
    parser.set_defaults(run=_run_steward, prog="headrace steward")


def _run_init(parsed: argparse.Namespace) -> int:

    settings, folder = read_settings(parsed, "control"), parsed.out.resolve()
    wanted = Wanted(models=parsed.model, tenants=parsed.tenant, workers=parsed.worker)
    return run_init(settings, folder, wanted, jwt=parsed.jwt)


def _run_steward(parsed: argparse.Namespace) -> int:

    return run_steward(located_settings(parsed))
