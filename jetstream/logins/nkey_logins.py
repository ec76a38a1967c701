"""Makes logins of NATS users: nkey seeds in files, contexts that name them, and the server's configuration with permissions.

A login is three things with one name: `<name>.nk` (the seed, 0600), `<name>.json` (a context of the `nats` command line tool:
address, seed, prefix of the inboxes, certificates), and a user in the server's configuration.  Seeds that are there stay.

Beside them lies the key with which workers sign their model cards (`card.key`): frontends refuse cards of others.  From
`pools.key`, which no part needs, the contexts of workers have the secret of their pool.
"""

from __future__ import annotations

import json
import os
import secrets
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import nkeys

from headrace.jetstream.api import API
from headrace.jetstream.context import pool_key
from headrace.jetstream.errors import ConnectError
from headrace.jetstream.logins.roles import PARTS_API, Login, Permissions, permissions, streams_account
from headrace.jetstream.subjects import Subjects
from headrace.jetstream.topology import Topology

SEED = ".nk"
CONTEXT = ".json"
API_EXPORT = f"{API}.>"
CARD_KEY = "card.key"
POOLS_KEY = "pools.key"
_SIGNING_ROLES = frozenset({"ingress", "worker"})  # what reads cards in order to run them, and what writes them


class LoginFileUnusable(ConnectError):
    """The file of a login cannot be read or written."""


def new_seed() -> str:
    return str(nkeys.encode_seed(secrets.token_bytes(32), nkeys.PREFIX_BYTE_USER).decode())


def public_key(seed: str) -> str:
    """Return the public key of a seed, which names the user in the server's configuration. Raises ConnectError."""
    try:
        return str(nkeys.from_seed(bytearray(seed.encode())).public_key.decode())
    except (nkeys.NkeysError, ValueError) as error:
        raise ConnectError(f"it is no nkey seed of a user: {error}") from None


def _secret_file(folder: Path, name: str) -> Path:
    """Return a secret file; it is created if it is missing. Raises LoginFileUnusable."""
    path = folder / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
            file.write(secrets.token_hex(32) + "\n")
    except FileExistsError:
        pass
    except OSError as error:
        raise LoginFileUnusable(f"the key {path} cannot be written: {error.strerror}") from None
    return path


def _pool_keys(folder: Path, login: Login) -> dict[str, str]:
    """Return the secrets that the workers of the login's pool share; those of all pools for a worker of any pool."""
    if login.role != "worker":
        return {}
    root = _secret_file(folder, POOLS_KEY).read_text().strip()
    return {"headrace_pool_key": pool_key(root, login.scope)} if login.scope else {"headrace_pools_key": root}


def user_key(folder: Path, name: str) -> str:
    """Return the public key of a login by its name; a missing seed is made. Raises LoginFileUnusable."""
    path = folder / (name + SEED)
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except FileExistsError:
            return public_key(path.read_text().strip())
        with os.fdopen(descriptor, "w") as file:
            seed = new_seed()
            file.write(seed + "\n")
        return public_key(seed)
    except OSError as error:
        raise LoginFileUnusable(f"the login file {path} cannot be used: {error.strerror}") from None
    except ConnectError as error:
        raise LoginFileUnusable(f"the login file {path} cannot be used: {error}") from None


def write_context(
    folder: Path,
    login: Login,
    *,
    url: str,
    prefix: str,
    tls: Mapping[str, str] | None = None,
    credentials: str | None = None,
) -> Path:
    """Write the context of a login to a deployment with this prefix, and return its path.

    `tls`: `ca`, `cert` and `key`, as far as they are needed. `credentials`: the name of its file with a token and a seed, where
    the server knows users by tokens.
    """
    path = folder / (login.name + CONTEXT)
    asked = permissions(Topology(Subjects(prefix)), login).asked
    context = {
        "description": f"headrace {login.name}",
        "url": url,
        **(
            {"creds": str((folder / credentials).absolute())}
            if credentials
            else {"nkey": str((folder / (login.name + SEED)).absolute())}
        ),
        "inbox_prefix": login.inbox,
        "jetstream_api_prefix": PARTS_API,
        **({"headrace_steward": login.steward(prefix)} if login.role != "operator" else {}),
        **({"headrace_asked": asked} if asked else {}),
        **({"headrace_worker": login.worker} if login.role == "worker" else {}),
        **({"headrace_card_key": str(_secret_file(folder, CARD_KEY).absolute())} if login.role in _SIGNING_ROLES else {}),
        **_pool_keys(folder, login),
        **(tls or {}),
    }
    return write_private_context(path, context)


def write_private_context(path: Path, context: Mapping[str, object]) -> Path:
    """Write a context that only the user of the deployment can read, and return its path. Raises LoginFileUnusable."""
    fresh = path.with_suffix(".new")
    try:
        with os.fdopen(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
            json.dump(context, file, indent=1)
        fresh.replace(path)
    except OSError as error:
        raise LoginFileUnusable(f"the context {path} cannot be written: {error.strerror}") from None
    return path


def accounts_config(topology: Topology, keys: Mapping[Login, str]) -> str:
    """Return the accounts of a server's configuration: one with the streams, and one with a user for each login.

    The account of the streams has no user. What parts may do there is exported, and their allow-lists say which of them may do
    what; answers of the server stay in the account of the parts.
    """
    exported = exported_subjects(topology)
    account = streams_account(topology.subjects.prefix)
    lines = ["accounts {", f"  {account}: {{", "    jetstream: enabled", "    exports: ["]
    for subject in exported:
        kind = ", response_type: stream" if subject == API_EXPORT else ""  # a pull and a batch have many answers
        lines.append(f"      {{ service: {json.dumps(subject)}, accounts: [{account}_PARTS]{kind} }}")
    lines += ["    ]", "  }", f"  {account}_PARTS: {{", "    imports: ["]
    for subject in exported:
        to = f", to: {json.dumps(f'{PARTS_API}.>')}" if subject == API_EXPORT else ""
        lines.append(f"      {{ service: {{ account: {account}, subject: {json.dumps(subject)} }}{to} }}")
    lines += ["    ]", "    users: ["]
    for login, key in sorted(keys.items()):
        allowed = _permission_lines(permissions(topology, login))
        lines += [f"      # {login.name}", "      {", f"        nkey: {key}", *allowed, "      }"]
    return "\n".join([*lines, "    ]", "  }", "}"]) + "\n"


def exported_subjects(topology: Topology) -> list[str]:
    """Return the exports of the streams' account: the JetStream API, acks, and the subjects that parts publish to.

    All object stores are exported, because those of single pools are made later.
    """
    subjects = {subject for spec in topology.all_streams() for subject in spec.subjects}
    named = sorted(subject for subject in subjects if not subject.startswith(("$JS.", "$O.")))
    return [API_EXPORT, "$JS.ACK.>", "$O.>", *named]


def _permission_lines(allowed: Permissions) -> list[str]:
    return [
        "      permissions: {",
        *_allow("publish", allowed.publish),
        *_allow("subscribe", allowed.subscribe),
        "      }",
    ]


def _allow(what: str, subjects: Sequence[str]) -> list[str]:
    return [f"        {what}: {{ allow: [", *(f"          {json.dumps(subject)}" for subject in subjects), "        ] }"]


def make_keys(folder: Path, logins: Iterable[Login]) -> dict[Login, str]:
    return {login: user_key(folder, login.name) for login in sorted(logins)}


# The one login of a deployment whose NATS server knows no roles: its user may do everything, in the account that a server
# without logins uses (`$G`). So no stored data has to be moved when a server begins to ask for a login, and a message costs the
# server no lookup. The server gets the public key alone.


def one_user_config(folder: Path, name: str) -> str:
    """Return the part of a server's configuration that admits the owner of the seed; a missing seed is made.

    Raises LoginFileUnusable.
    """
    return f"authorization {{ users: [ {{ nkey: {user_key(folder, name)} }} ] }}\n"


def write_one_context(folder: Path, name: str, *, url: str, tls: Mapping[str, str]) -> Path:
    """Write the context of the login for a server that listens at `url`, and return its path. Raises LoginFileUnusable."""
    seed = str((folder / (name + SEED)).absolute())
    return write_private_context(folder / (name + CONTEXT), {"description": "headrace", "url": url, "nkey": seed, **tls})
