"""Makes the login of electors, which is one of the system account and may ask for raft groups and call elections only."""

from __future__ import annotations

import json
from pathlib import Path

from headrace.jetstream.elections.raft_groups import ASK_ACCOUNTS, ASK_GROUPS, vote_subject
from headrace.jetstream.logins.nkey_logins import CONTEXT, SEED, write_private_context
from headrace.jetstream.logins.permissions import Permissions
from headrace.jetstream.logins.roles import INBOX

ELECTOR = "elector"
_INBOX = f"{INBOX}.{ELECTOR}.>"
PERMISSIONS = Permissions(publish=(ASK_GROUPS, ASK_ACCOUNTS, vote_subject("*"), _INBOX), subscribe=(_INBOX,))


def with_elector(accounts: str, key: str) -> str:
    """Return the accounts of a server's configuration with one of the system, in which the elector with this public key is."""
    user = {"nkey": key, "permissions": {"publish": PERMISSIONS.publish, "subscribe": PERMISSIONS.subscribe}}
    begin = "accounts {\n"
    return accounts.replace(begin, f"system_account: SYS\n{begin}  SYS: {{ users: [{json.dumps(user)}] }}\n", 1)


def write_elector_context(folder: Path, *, url: str, tls: dict[str, str], credentials: str = "") -> Path:
    """Write the context of electors, beside their seed or credentials, and return its path. Raises LoginFileUnusable."""
    login = {"creds": credentials} if credentials else {"nkey": ELECTOR + SEED}
    context = {"description": "headrace elector", "url": url, **{k: str((folder / v).absolute()) for k, v in login.items()}}
    return write_private_context(folder / (ELECTOR + CONTEXT), {**context, **tls})
