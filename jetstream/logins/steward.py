"""Makes consumers for logins that may not make them, because the maker of a consumer says where its messages go, and calls
that logins may make for their own pool only.

A login asks at a subject of its own, `<prefix>.steward.<role>.<pool or tenant>`, so that the subject says who asks.  The
steward holds the login to its rules (`Permissions.consumers`, `asked`, `reach`) and makes pull consumers only, whose messages
go to the inbox of the process that pulls.  The answer is that of the server's API, compressed if no message would hold it.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Mapping
from typing import Any, get_args

import msgspec
import structlog

from headrace.jetstream.api import CONSUMER_CREATE, ApiError, SubjectPattern
from headrace.jetstream.client import Connection
from headrace.jetstream.errors import JetStreamError, SubjectError
from headrace.jetstream.logins.roles import Login, NotTheirs, PoolCalls, RoleName, permissions
from headrace.jetstream.ports import Message
from headrace.jetstream.provision import ensure_on_demand
from headrace.jetstream.specs import StreamSpec
from headrace.jetstream.tasks import TaskScope
from headrace.jetstream.topology import Topology

log = structlog.get_logger(__name__)

REFUSED = 10903  # of our own, beside the server's numbers
NOT_MADE = 10904

# Fields of a pull consumer that a login may set. All others are refused, so that a field of a later server cannot pass unseen.
_FIELDS = frozenset(
    {
        "name",
        "durable_name",
        "description",
        "deliver_policy",
        "opt_start_seq",
        "ack_policy",
        "replay_policy",
        "ack_wait",
        "max_deliver",
        "max_ack_pending",
        "max_waiting",
        "mem_storage",
        "num_replicas",
        "metadata",
        "filter_subject",
        "inactive_threshold",
        "priority_groups",
        "priority_policy",
    }
)


_CALL = re.compile(r"CONSUMER\.CREATE\.[A-Za-z0-9_$~*>.-]+\Z")  # nothing that could end the line of a command


class _Wish(msgspec.Struct, frozen=True):
    call: str
    body: dict[str, Any] | None = None


def login_of(subject: str, topology: Topology) -> Login:
    """Return the login that asks at this subject. Raises SubjectError."""
    parts = subject.removeprefix(f"{topology.subjects.prefix}.steward.").split(".")
    if len(parts) not in (2, 3) or parts[0] not in get_args(RoleName):
        raise SubjectError(f"{subject!r} is no subject of a steward")
    role, scope, member = (*parts, "")[:3]
    return Login(role, "" if scope == "_" else scope, member)  # type: ignore[arg-type]  # it is one of them


def refusal(topology: Topology, login: Login, call: str, body: Mapping[str, Any]) -> str:
    """Return why a login may not have this consumer, or an empty string."""
    if not _CALL.match(call):
        return "it is no call that makes a consumer with a filter"
    name = call.removeprefix(CONSUMER_CREATE)
    stream, _, rest = name.partition(".")
    consumer, _, pattern = rest.partition(".")
    config = body.get("config")
    if not isinstance(config, dict) or body.get("stream_name") != stream or set(body) - {"stream_name", "config"}:
        return "the body is no configuration of a consumer of that stream"
    if strange := sorted(set(config) - _FIELDS):
        return f"{strange[0]!r} cannot be chosen"
    if config.get("name") != consumer or config.get("durable_name", consumer) != consumer:
        return f"the name is not {consumer!r}"
    if not pattern or config.get("filter_subject") != pattern:
        return f"the filter is not {pattern!r}"
    allowed = permissions(topology, login).consumers
    if not any(SubjectPattern(one).covers(call.encode()) for one in allowed):
        return f"the role {login.name} has no such consumers"
    return ""


class Steward:
    """The steward of one deployment, on the connection of an operator."""

    def __init__(self, connection: Connection, topology: Topology, tasks: TaskScope) -> None:
        self._connection = connection
        self._topology = topology
        self._tasks = tasks
        self._calls = PoolCalls(connection.api)

    async def start(self) -> None:
        """Answer from now on, while the connection is open."""
        for asked in ("steward.*.*", "steward.*.*.*"):
            await self._connection.subscribe(f"{self._topology.subjects.prefix}.{asked}", self._on_wish, queue="steward")

    def _on_wish(self, message: Message) -> None:
        if not message.reply or not self._tasks.is_open:
            return
        try:
            login = login_of(message.subject, self._topology)
            wish = msgspec.json.decode(message.data, type=_Wish)
        except (SubjectError, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            self._answer(message.reply, REFUSED, f"the wish cannot be read: {error}")
            return
        if wish.call.startswith(CONSUMER_CREATE) and (why := refusal(self._topology, login, wish.call, wish.body or {})):
            self._refuse(login, wish, message.reply, why)
        else:
            work = self._make(login, wish, message.reply)
            self._tasks.spawn_guarded(work, lambda error: self._failed(message.reply, error))

    async def _make(self, login: Login, wish: _Wish, reply: str) -> None:
        try:
            if wish.call.startswith(CONSUMER_CREATE):
                made = await self._connection.api.call(wish.call, wish.body)
            elif (spec := self._on_demand(wish.call)) is not None:
                made = await self._make_on_demand(login, wish.call, spec)
            else:
                allowed = permissions(self._topology, login)
                made = await self._calls.make(allowed, wish.call, wish.body, in_use=lambda s: self._in_use(login, s))
        except NotTheirs as error:
            self._refuse(login, wish, reply, str(error))
        except ApiError as error:
            self._answer(reply, error.err_code, error.description)
        except JetStreamError as error:
            self._answer(reply, NOT_MADE, str(error))
        else:
            answer = msgspec.json.encode(made)
            if len(answer) > self._connection.max_payload:  # the server's base64 of a message that is almost as large
                answer = zlib.compress(answer, 1)
            self._connection.send(reply, answer)

    def _on_demand(self, call: str) -> StreamSpec | None:
        """Return the stream that a call would make, if it is one on demand."""
        stream = call.removeprefix("STREAM.CREATE.")
        if stream == call:
            return None
        audit = self._topology.audit()
        return audit if stream == audit.name else self._topology.pool_store(stream)

    async def _make_on_demand(self, login: Login, call: str, spec: StreamSpec) -> dict[str, Any]:
        """Make a stream as the topology describes it, ignoring the configuration in the request."""
        if call not in permissions(self._topology, login).asked:
            raise NotTheirs(f"the role {login.name} makes no streams")
        await ensure_on_demand(self._connection, spec)
        return {}

    async def _in_use(self, login: Login, subject: str) -> bool:
        """Return True if a subject is of another worker than the login's, and that worker has a lease.

        A login of all workers of a pool is each of them.
        """
        parts = subject.split(".")
        if not login.member or len(parts) != 4 or parts[3] == login.member:
            return False
        subjects = self._topology.subjects
        leases = self._connection.bucket(subjects.bucket("members"))
        return await leases.get(subjects.worker_key(parts[2], parts[3])) is not None

    def _refuse(self, login: Login, wish: _Wish, reply: str, why: str) -> None:
        log.warning("consumer.refused", login=login.name, call=wish.call[:256], reason=why)
        self._answer(reply, REFUSED, why)

    def _failed(self, reply: str, error: Exception) -> None:
        log.error("consumer.not_made", error=str(error), kind=type(error).__name__)
        self._answer(reply, NOT_MADE, f"it could not be made: {type(error).__name__}")

    def _answer(self, reply: str, code: int, why: str) -> None:
        fault = {"code": 403 if code == REFUSED else 500, "err_code": code, "description": why}
        self._connection.send(reply, msgspec.json.encode({"error": fault}))
