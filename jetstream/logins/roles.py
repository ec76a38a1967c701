"""Names the roles that log in at the NATS server, and the logins that a deployment has of them.

A login is a role, and where the role is narrower than a deployment also a pool or a tenant.  Its name is the name of its files,
and a part of the subjects at which its replies arrive: `_INBOX.<role>.<pool or tenant>.…`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from headrace.jetstream.errors import SubjectError
from headrace.jetstream.subjects import check_token

RoleName = Literal["operator", "ingress", "router", "worker", "planner", "console", "batch"]
ROLES: tuple[RoleName, ...] = get_args(RoleName)
BY_POOL: frozenset[str] = frozenset({"router", "worker"})  # may be limited to one pool
INBOX = "_INBOX"


@dataclass(frozen=True, slots=True, order=True)
class Login:
    """A user at the NATS server. `scope` is the pool of a router or worker, empty for all pools, or the tenant of `batch`.

    `member`: the id of the one worker that may use it, empty for all workers of the pool.
    """

    role: RoleName
    scope: str = ""
    member: str = ""

    def __post_init__(self) -> None:
        if self.role not in ROLES:
            raise SubjectError(f"role {self.role!r} is not one of {', '.join(ROLES)}")
        if self.scope:
            check_token(self.scope, "pool or tenant")
        if self.member:
            check_token(self.member, "worker")
            if self.role != "worker":
                raise SubjectError(f"a login of the role {self.role!r} is of no single process, got {self.member!r}")
        if self.role == "batch" and not self.scope:
            raise SubjectError("the role 'batch' needs a tenant")
        if self.scope and self.role != "batch" and self.role not in BY_POOL:
            raise SubjectError(f"the role {self.role!r} has neither pools nor tenants, got {self.scope!r}")

    @property
    def name(self) -> str:
        """The name of its files and of its user."""
        name = f"{self.role}-{self.scope}" if self.scope else self.role
        return f"{name}.{self.member}" if self.member else name

    @property
    def inbox(self) -> str:
        """The prefix of the subjects at which its replies arrive."""
        return f"{INBOX}.{self.role}.{self.scope or '_'}{f'.{self.member}' if self.member else ''}"

    def steward(self, prefix: str) -> str:
        """Return the subject at which it asks for consumers."""
        return f"{prefix}.steward.{self.role}.{self.scope or '_'}{f'.{self.member}' if self.member else ''}"

    @property
    def pool(self) -> str:
        """The pool as it stands in subjects: its token, or the wildcard."""
        return self.scope if self.scope and self.role in BY_POOL else "*"

    @property
    def worker(self) -> str:
        """The worker as it stands in subjects: its id, or the wildcard."""
        return self.member or "*"


def inboxes(role: RoleName, scope: str = "*") -> str:
    """Return the pattern of the inboxes of a role; of one pool or tenant, or of all of them."""
    return f"{INBOX}.{role}.{scope}.>"


def streams_account(prefix: str) -> str:
    """Return the account of the server that has the streams of a deployment with this prefix."""
    return prefix.upper()
