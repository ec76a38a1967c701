"""Makes the one login of a deployment whose NATS server knows no roles: a seed, a context that names it, and a user.

The user may do all, and is of the account that a server without logins uses (`$G`).  So nothing that is stored has to be moved
when a server begins to ask for it, and a message costs the server no look at a list.  The server is told the public key alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from headrace.jetstream.logins.nkey_logins import CONTEXT, SEED, user_key, write_private_context


def one_user_config(folder: Path, name: str) -> str:
    """Return the part of a server's configuration that lets in who has the seed. Raises LoginFileUnusable.

    The seed is made if it is not there.
    """
    return f"authorization {{ users: [ {{ nkey: {user_key(folder, name)} }} ] }}\n"


def write_one_context(folder: Path, name: str, *, url: str, tls: Mapping[str, str]) -> Path:
    """Write the context of the login for a server that listens at `url`, and return its path. Raises LoginFileUnusable."""
    seed = str((folder / (name + SEED)).absolute())
    return write_private_context(folder / (name + CONTEXT), {"description": "headrace", "url": url, "nkey": seed, **tls})
