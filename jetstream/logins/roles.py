"""Roles that log in at the NATS server: their logins, their permissions, and the JetStream calls that a steward makes for them.

A login is a role, and where the role is narrower than a deployment also a pool or a tenant. Its name is the name of its files,
and a part of the subjects at which its replies arrive: `_INBOX.<role>.<pool or tenant>.…`.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import msgspec

from headrace.jetstream.api import CONSUMER_CREATE, JsApi, SubjectPattern
from headrace.jetstream.errors import SubjectError
from headrace.jetstream.subjects import MOVED_CLASSES, REQUEST_CLASSES, check_token
from headrace.jetstream.topology import AUDIT, POOL_STORES, Topology

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
        return f"{INBOX}.{self.role}.{self.scope or '_'}{f'.{self.member}' if self.member else ''}"

    def steward(self, prefix: str) -> str:
        return f"{prefix}.steward.{self.role}.{self.scope or '_'}{f'.{self.member}' if self.member else ''}"

    @property
    def pool(self) -> str:
        """The pool as a token in subjects, or the wildcard."""
        return self.scope if self.scope and self.role in BY_POOL else "*"

    @property
    def worker(self) -> str:
        """The worker's id as a token in subjects, or the wildcard."""
        return self.member or "*"


def inboxes(role: RoleName, scope: str = "*") -> str:
    """Return the pattern of the inboxes of a role; of one pool or tenant, or of all of them."""
    return f"{INBOX}.{role}.{scope}.>"


def streams_account(prefix: str) -> str:
    """Return the server account that holds the streams of the deployment."""
    return prefix.upper()


# `permissions` returns the allow-lists of a login; the server refuses everything else.
#
# No login has the server's response permissions (`allow_responses`): a login that may publish and subscribe to any one subject
# could send itself a message with the reply subject of its choice, and then write there. Inboxes are listed instead.
#
# Consumers are made by a steward (`headrace.jetstream.logins.steward`): `Permissions.consumers` has those that a login may ask
# for.

RANKS = 64  # of a worker with a login of its own: data-parallel ranks whose cache events it may publish
PARTS_API = "JS.HR.API"  # the JetStream API in the account of the parts, which has no JetStream of its own


@dataclass(frozen=True, slots=True)
class Permissions:
    publish: tuple[str, ...]
    subscribe: tuple[str, ...]
    consumers: tuple[str, ...] = ()  # calls that make a consumer, which the steward makes for the login
    asked: tuple[str, ...] = ()  # other calls that the steward makes for the login, as far as they touch what it reaches:
    reach: tuple[str, ...] = ()  # the subjects of messages, and the filters of consumers
    counted: tuple[str, ...] = ()  # the subjects that the login may have listed and counted


class RuleBook:
    """Collects the permissions of one login, in terms of what it does with streams, buckets and object stores.

    A name that changes in `headrace.jetstream.subjects` or `headrace.jetstream.topology` therefore changes here too.
    """

    def __init__(self, topology: Topology, login: Login) -> None:
        self._topology = topology
        self.s = topology.subjects
        self.p = topology.subjects.prefix
        self.pool = login.pool
        self.worker = login.worker
        self._steward = login.steward(self.p)
        self._publish: set[str] = set()
        self._consumers: set[str] = set()
        self._asked: set[str] = set()
        self._reach: set[str] = set()
        self._counted: set[str] = set()
        self._subscribe: set[str] = {f"{login.inbox}.>"}

    def permissions(self) -> Permissions:
        if self._consumers or self._asked:
            self._publish.add(self._steward)
        lists = (self._publish, self._subscribe, self._consumers, self._asked, self._reach, self._counted)
        return Permissions(*(tuple(sorted(found)) for found in lists))

    def tell(self, *subjects: str) -> None:
        self._publish |= {f"{self.p}.{subject}" for subject in subjects}

    def hear(self, *subjects: str) -> None:
        """Let the login subscribe to these subjects of the deployment, without its prefix."""
        self._subscribe |= {f"{self.p}.{subject}" for subject in subjects}

    def answer(self, *patterns: str) -> None:
        self._publish |= set(patterns)

    def api(self, *calls: str) -> None:
        """Let the login make these calls of the JetStream API."""
        self._consumers |= {call for call in calls if call.startswith(CONSUMER_CREATE)}
        self._publish |= {f"{PARTS_API}.{call}" for call in calls if not call.startswith(CONSUMER_CREATE)}

    def everything(self) -> None:
        """Let the login do everything with the deployment, and answer every request."""
        self._publish |= {f"{self.p}.>", f"{PARTS_API}.>", "$JS.ACK.>", "$KV.>", "$O.>", "_INBOX.>"}
        self._subscribe |= {f"{self.p}.>"}

    # Streams:

    def connect(self) -> None:
        """Let the login find out whether JetStream is there and whether the streams are as they should be.

        The server's `STREAM.INFO` lists all subjects of a stream, with names of tenants in them. The steward makes the call,
        and lists those that are `counted`.
        """
        self.api("INFO", "STREAM.NAMES")
        stores = self._topology.pool_stores(self.pool) if self.pool != "*" else ()
        specs = (*self._topology.all_streams(), *(store.stream() for store in stores))
        self._asked |= {f"STREAM.INFO.{spec.name}" for spec in specs}

    def list_subjects(self, *streams: str) -> None:
        """Let the login list the subjects of these streams itself, or of all streams if none is given."""
        calls = {f"STREAM.INFO.{stream}" for stream in streams}
        self._asked = {call for call in self._asked if call not in calls and (calls or not call.startswith("STREAM.INFO."))}
        self.api(*(calls or ["STREAM.INFO.*"]))

    def count(self, *patterns: str) -> None:
        """Let the login list and count these subjects of the deployment, without its prefix."""
        self._counted |= {f"{self.p}.{pattern}" for pattern in patterns}

    def scan(self, *kinds: str) -> None:
        """Let the login read the messages of these streams by sequence and subject."""
        for kind in kinds:
            self.api(f"DIRECT.GET.{self.s.stream(kind)}", f"STREAM.MSG.GET.{self.s.stream(kind)}")

    def remove(self, *kinds: str) -> None:
        """Let the login delete single messages of these streams."""
        self.api(*(f"STREAM.MSG.DELETE.{self.s.stream(kind)}" for kind in kinds))

    def consume(self, kind: str, consumer: str, pattern: str) -> None:
        """Let the login make a durable consumer with this filter, pull from it and ack."""
        stream = self.s.stream(kind)
        self.api(f"CONSUMER.CREATE.{stream}.{consumer}.{pattern}", f"CONSUMER.MSG.NEXT.{stream}.{consumer}")
        self._publish.add(f"$JS.ACK.{stream}.{consumer}.>")

    def follow(self, kind: str, pattern: str) -> None:
        """Let the login read a stream in order, by a consumer of its own that acks nothing."""
        stream = self.s.stream(kind)
        self.api(f"CONSUMER.CREATE.{stream}.*.{pattern}", f"CONSUMER.MSG.NEXT.{stream}.*", f"CONSUMER.DELETE.{stream}.*")

    def on_demand(self, stream: str) -> None:
        """Let the login have a stream made that is made on demand, as the topology describes it."""
        self._asked.add(f"STREAM.CREATE.{stream}")

    def of_own_pool(self, kind: str, *patterns: str) -> None:
        """Let the login read and delete the messages of a stream, and list and delete its consumers, with these subjects only.

        The server's calls name the stream, which all pools share: the steward looks at what they touch. A login of all pools
        makes the calls itself.
        """
        stream = self.s.stream(kind)
        if self.pool == "*":
            self.scan(kind)
            self.remove(kind)
            self.api(f"CONSUMER.LIST.{stream}", f"CONSUMER.DELETE.{stream}.*")
            return
        self._asked |= {
            f"STREAM.MSG.GET.{stream}",
            f"STREAM.MSG.DELETE.{stream}",
            f"CONSUMER.LIST.{stream}",
            f"CONSUMER.DELETE.{stream}.*",
        }
        self._reach |= {f"{self.p}.{pattern}" for pattern in patterns}

    # Buckets:

    def look_up(self, *kinds: str) -> None:
        """Let the login read the entries of these buckets."""
        for kind in kinds:
            stream = f"KV_{self.s.bucket(kind)}"
            self.api(f"STREAM.MSG.GET.{stream}", f"DIRECT.GET.{stream}")

    def watch(self, *kinds: str) -> None:
        """Let the login follow the changes of these buckets."""
        for kind in kinds:
            bucket = self.s.bucket(kind)
            self.api(
                f"CONSUMER.CREATE.KV_{bucket}.*.$KV.{bucket}.>",
                f"CONSUMER.MSG.NEXT.KV_{bucket}.*",
                f"CONSUMER.DELETE.KV_{bucket}.*",
            )

    def record(self, kind: str, *keys: str) -> None:
        """Let the login write these keys of a bucket."""
        self._publish |= {f"$KV.{self.s.bucket(kind)}.{key}" for key in keys}

    # Object stores:

    def fetch(self, *kinds: str) -> None:
        """Let the login read the objects of these stores."""
        for kind in kinds:
            stream = f"OBJ_{self.s.bucket(kind)}"
            self.api(f"STREAM.MSG.GET.{stream}", f"DIRECT.GET.{stream}")

    def add(self, *kinds: str) -> None:
        """Let the login read and write the objects of these stores."""
        self.fetch(*kinds)
        for kind in kinds:
            self._publish |= {f"$O.{self.s.bucket(kind)}.C.*", f"$O.{self.s.bucket(kind)}.M.*"}

    def keep(self, *kinds: str) -> None:
        """Let the login read, write and delete the objects of these stores."""
        self.add(*kinds)
        for kind in kinds:
            self.api(f"STREAM.PURGE.OBJ_{self.s.bucket(kind)}")

    def keep_in_pool(self, *kinds: str) -> None:
        """Let the login have these stores of its pool made, and read and change what is there. One of all pools has none."""
        for kind in kinds if self.pool != "*" else ():
            store = self.s.pool_bucket(kind, self.pool)
            self.api(*(f"{call}.OBJ_{store}" for call in ("STREAM.MSG.GET", "DIRECT.GET", "STREAM.PURGE")))
            self._publish |= {f"$O.{store}.C.*", f"$O.{store}.M.*"}
            self.on_demand(f"OBJ_{store}")

    # What routers and workers share:

    def requests(self, classes: Sequence[str] = REQUEST_CLASSES) -> None:
        """Let the login take the requests of its pool from their queues, and store them again."""
        for request_class in classes:
            kind = "MOVED" if request_class in MOVED_CLASSES else "REQ"
            consumer = f"REQ_{self.pool}_{request_class}" if self.pool != "*" else "*"
            pattern = f"{self.p}.req.{self.pool}.{request_class}.*"
            self.consume(kind, consumer, pattern)
        self.tell(*(f"req.{self.pool}.{moved}.*" for moved in sorted(MOVED_CLASSES)))

    def move_work(self) -> None:
        """Let the login place requests on workers of its pool, and take those of dead workers away again."""
        self.tell(f"work.{self.pool}.*", f"ev.{self.pool}", f"dlq.{self.pool}")
        self.list_subjects(self.s.stream("WORK"))  # of pools and workers, whose leases it sees, too; without a steward as well
        self.of_own_pool("WORK", f"work.{self.pool}.*")
        self.of_own_pool("PREFILL", f"prefill.{self.pool}", f"prefill.{self.pool}.*")
        if self.worker == "*":
            self.record("members", f"worker.{self.pool}.*")  # obituaries of workers that are known to be dead
        else:
            self.record("members", f"worker.{self.pool}.{self.worker}")  # its own lease: others are seen to run out
        self.look_up("members", "state")
        self.watch("members")


def permissions(topology: Topology, login: Login) -> Permissions:
    book = RuleBook(topology, login)
    _RULES[login.role](book, login)
    return book.permissions()


def _operator(book: RuleBook, _login: Login) -> None:
    book.everything()


def _ingress(book: RuleBook, login: Login) -> None:
    book.connect()
    book.list_subjects()  # it serves all tenants
    book.tell(*(f"req.*.{request_class}.*" for request_class in REQUEST_CLASSES))
    book.scan("REQ", "MOVED")
    book.remove("REQ", "MOVED")  # a request that waited in vain, and the message that tries whether the broker stores
    book.tell("ctl.*", "judge.*", "cancel.*", "find.*", "dlq.*", "refused.*", "quota.open", "quota.*.*.*")
    book.tell("adm.worker.*.*")  # adapters, which clients may load over HTTP where that is switched on
    book.hear("out.*", "out.*.*.*", "judge.*", "judge.*.*.*", "ev.*", "quota.open", "cancel.jobs", "audit")
    book.answer(*(inboxes(role) for role in _ASKING), f"{login.inbox}.>")
    book.record("members", "ingress.*", "worker.*.*")
    book.record("state", "*", "*.*", "*.*.*")
    book.look_up("members", "state", "models", "keys", "batches", "files", "records")
    book.watch("members", "models", "keys", "batches")
    book.fetch("models")
    book.keep("spill", "responses", "files", "results")
    for bucket in ("batches", "files", "records"):
        book.record(bucket, ">")
    book.tell("audit.*")
    book.on_demand(book.s.stream(AUDIT))
    # Stored jobs:
    book.tell("job.*.*", "rsp.*.*", "result.*.*", "jobev.*.*")
    book.scan("JOB", "RSP", "RESULT", "QUOTA")
    book.remove("JOB")
    book.consume("JOB", "*", f"{book.p}.job.*.*")
    book.api(f"CONSUMER.INFO.{book.s.stream('JOB')}.*")
    book.follow("RSP", f"{book.p}.rsp.*.*")
    book.follow("RESULT", f"{book.p}.result.*.*")


def _router(book: RuleBook, login: Login) -> None:
    book.connect()
    book.requests()
    book.move_work()
    book.count(f"req.{book.pool}.>")
    book.tell(f"route.{book.pool}", f"adm.worker.{book.pool}.*", "ctl.*", "judge.*")
    book.hear(f"load.{book.pool}.*", f"ev.{book.pool}", f"cancel.{book.pool}", "ctl.*")
    book.answer(inboxes("ingress"), inboxes("operator"), inboxes("console"), f"{login.inbox}.>")
    book.scan("LOAD")
    book.record("members", f"router.{book.pool}.*", f"snapshots.{book.pool}")
    book.record("state", f"snapshot.{book.pool}", "drained.*")
    book.look_up("models")
    book.watch("models")
    book.keep("snapshots")
    book.follow("KV", f"{book.p}.kv.{book.pool}.*")
    book.scan("KV")
    book.api(f"STREAM.PURGE.{book.s.stream('KV')}")


def _worker(book: RuleBook, login: Login) -> None:
    book.connect()
    book.requests()  # a pool without a router places requests itself
    book.move_work()
    me = f"{book.pool}.{book.worker}"
    book.tell(f"out.*.{me}", f"judge.*.{me}", f"peer.{book.pool}.*", f"load.{me}", f"kv.{me}")
    if login.member:
        book.tell(*(f"kv.{me}~{rank}" for rank in range(RANKS)))  # the wildcard of `kv.<pool>.*` covers them else
    book.tell(f"prefill.{book.pool}", f"prefill.{book.pool}.*")
    book.hear(f"ctl.{book.worker}", f"peer.{me}", f"adm.worker.{me}")
    book.hear(f"find.{book.pool}", f"cancel.{book.pool}", f"load.{book.pool}.*")
    book.answer(inboxes("ingress"), inboxes("operator"), inboxes("planner"))
    book.answer(inboxes("router", login.scope or "*"), inboxes("router", "_"), inboxes("worker", login.scope or "*"))
    book.consume("WORK", "*", f"{book.p}.work.{me}")
    book.consume("PREFILL", "*", f"{book.p}.prefill.{book.pool}")  # as of WORK: no name is known that is not its own
    book.consume("PREFILL", "*", f"{book.p}.prefill.{me}")
    book.scan("LOAD")
    book.record("members", f"janitor.{book.pool}")
    book.record("state", f"drained.{book.worker}", f"janitor.{book.pool}")
    book.record("models", book.pool)
    book.look_up("models")
    book.keep("models")
    book.fetch("adapters")
    book.add("spill")  # sealed payloads, and results that are too large for a frame
    book.keep_in_pool(*POOL_STORES)


def _planner(book: RuleBook, login: Login) -> None:
    _console(book, login)
    book.tell("adm.worker.*.*", "ctl.*", "audit")
    book.hear("refused.*")
    book.scan("ROUTE")
    book.look_up("state", "batches")
    book.record("state", "planner_leader", "planner.>", "plan.>")


def _console(book: RuleBook, login: Login) -> None:
    book.connect()
    book.count("req.>", "work.>", "job.>")
    book.api("STREAM.LIST", "CONSUMER.LIST.*", "CONSUMER.INFO.*.*")
    book.look_up("members")
    book.scan("LOAD")
    book.watch("members", "models")
    book.hear("load.*.*", "ev.*")


def _batch(book: RuleBook, login: Login) -> None:
    tenant, result = login.scope, book.s.stream("RESULT")
    book.api("INFO", f"DIRECT.GET.{result}.{book.p}.result.{tenant}.*")
    book.tell(f"job.*.{tenant}")
    book.hear(f"jobev.{tenant}.*")


_ASKING: tuple[RoleName, ...] = ("router", "worker", "operator", "planner")  # an ingress that is asked

_RULES: dict[RoleName, Callable[[RuleBook, Login], None]] = {
    "operator": _operator,
    "ingress": _ingress,
    "router": _router,
    "worker": _worker,
    "planner": _planner,
    "console": _console,
    "batch": _batch,
}


PAGE = 256  # consumers in one answer, as the server has it

READ, DELETE = "STREAM.MSG.GET", "STREAM.MSG.DELETE"
LIST, DROP = "CONSUMER.LIST", "CONSUMER.DELETE"
LOOK = "STREAM.INFO"

_CALL = re.compile(r"[A-Za-z0-9_~.-]+\Z")  # no wildcard, and nothing that could end the line of a command
_QUERY = frozenset({"seq", "next_by_subj"})
_LOOK = frozenset({"subjects_filter", "offset"})


InUse = Callable[[str], Awaitable[bool]]  # of a subject: it is another worker's, and that worker lives


async def unused(_subject: str) -> bool:
    """Return False: a login of all workers of a pool is each of them."""
    return False


class NotTheirs(Exception):
    """The call touches messages or consumers of another pool or of a living worker, or is not a call that stewards make."""


class _Read(msgspec.Struct):
    subject: str


class _Answer(msgspec.Struct):
    message: _Read


class PoolCalls:
    """The calls that a steward makes for logins of one pool, on the connection of an operator.

    The server's calls name a stream, and all pools share it. So a steward checks the message or consumer that a call touches
    before it makes the call or returns the answer.
    """

    def __init__(self, api: JsApi) -> None:
        self._api = api

    async def make(self, allowed: Permissions, call: str, body: Any, *, in_use: InUse = unused) -> dict[str, Any]:
        """Make a call for a login with these permissions, and return the server's answer.

        What is `in_use` is not touched: a worker with a login of its own takes over the work of dead workers only.
        Raises NotTheirs, and ApiError or another JetStreamError as the call itself does.
        """
        if not _CALL.match(call) or not any(SubjectPattern(one).covers(call.encode()) for one in allowed.asked):
            raise NotTheirs(f"the role has no such call as {call[:256]}")
        if call.startswith(f"{LOOK}."):
            return await self._look(allowed.counted, call, body)
        reach = [SubjectPattern(one) for one in allowed.reach]
        name = ".".join(call.split(".")[: 3 if call.startswith("STREAM.") else 2])
        stream = call.removeprefix(f"{name}.").split(".")[0]
        if name == READ:
            return await self._read(reach, call, _query(body), in_use)
        if name == DELETE:
            await self._read(reach, f"{READ}.{stream}", {"seq": _query(body, more=frozenset({"no_erase"}))["seq"]}, in_use)
            return await self._api.call(call, body)
        if name == LIST:
            return await self._list(reach, call, body, in_use)
        if name == DROP:
            info = await self._api.call(call.replace(DROP, "CONSUMER.INFO", 1))
            if not await _within(reach, info, in_use):
                raise NotTheirs("the consumer is not one of its pool, or its worker lives")
            return await self._api.call(call)
        raise NotTheirs(f"{name} is not made for others")

    async def _look(self, counted: Sequence[str], call: str, body: Any) -> dict[str, Any]:
        """Describe a stream, with the requested subjects if the login may know all of them."""
        query = {} if body is None else body
        if not isinstance(query, dict) or set(query) - _LOOK:
            raise NotTheirs("the body is no question for subjects")
        wanted = query.get("subjects_filter")
        if wanted is not None and not (isinstance(wanted, str) and any(_within_pattern(wanted, one) for one in counted)):
            raise NotTheirs(f"the role does not count the subjects {str(wanted)[:256]}")
        return await self._api.call(call, query or None)

    async def _read(self, reach: list[SubjectPattern], call: str, query: Mapping[str, Any], in_use: InUse) -> dict[str, Any]:
        answer = await self._api.call(call, query)
        subject = msgspec.convert(answer, _Answer).message.subject
        if not any(one.covers(subject.encode()) for one in reach):
            raise NotTheirs("the message is not one of its pool")
        if await in_use(subject):
            raise NotTheirs("the message is another worker's, which lives")
        return answer

    async def _list(self, reach: list[SubjectPattern], call: str, body: Any, in_use: InUse) -> dict[str, Any]:
        offset = body.get("offset", 0) if isinstance(body, dict) else 0
        if not isinstance(offset, int) or offset < 0:
            raise NotTheirs(f"the offset is {offset!r}")
        found: list[dict[str, Any]] = []
        seen = 0
        while True:
            page = await self._api.call(call, {"offset": seen})
            consumers = page.get("consumers") or []
            seen += len(consumers)
            found += [consumer for consumer in consumers if await _within(reach, consumer, in_use)]
            if not consumers or seen >= page.get("total", 0):
                break
        return {**page, "total": len(found), "offset": offset, "consumers": found[offset : offset + PAGE]}


def _query(body: Any, *, more: frozenset[str] = frozenset()) -> dict[str, Any]:
    """Return the query for one message. Raises NotTheirs for any other form."""
    if not isinstance(body, dict) or not isinstance(body.get("seq"), int) or set(body) - _QUERY - more:
        raise NotTheirs("the body is no question for a message by its sequence")
    return body


def _within_pattern(wanted: str, pattern: str) -> bool:
    if wanted.endswith(">") and not pattern.endswith(">"):
        return False
    return SubjectPattern(pattern).covers(wanted.encode())


async def _within(reach: list[SubjectPattern], info: Mapping[str, Any], in_use: InUse) -> bool:
    """Return True for a consumer that reads only subjects within the login's reach, and none in use."""
    config = info.get("config") or {}
    filters = config.get("filter_subjects") or [config.get("filter_subject") or ">"]
    if not all(any(one.covers(subject.encode()) for one in reach) for subject in filters):
        return False
    return not any([await in_use(subject) for subject in filters])
