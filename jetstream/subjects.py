"""Subjects, stream names and bucket names: no other module builds or parses them.

Every token from outside (model, tenant, worker) passes `check_token` or `slug`, so a dot, a wildcard or a space can never enter
a subject. Tokens are `[A-Za-z0-9_-]`, 1 to 64 characters.
"""

from __future__ import annotations

import hashlib
import re
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal, NamedTuple

from headrace.jetstream.errors import SubjectError

RequestClass = Literal["re", "hi", "std", "rb", "batch"]
REQUEST_CLASSES: tuple[RequestClass, ...] = ("re", "hi", "std", "rb", "batch")  # in the order they are served
MOVED_CLASSES: frozenset[str] = frozenset(
    {"re", "rb"}
)  # of requests that were accepted once and are stored again: never capped
BATCH_CLASSES: frozenset[str] = frozenset({"rb", "batch"})  # they get the capacity that the others leave
DEFAULT_TENANT = "_"

_HIDDEN_MARK = "~"  # in no token
_TOKEN = re.compile(r"[A-Za-z0-9_-]{1,64}\Z")
_HASHED = re.compile(r"-[0-9a-f]{24}\Z")
_NOT_TOKEN = re.compile(r"[^A-Za-z0-9_-]+")


def check_token(value: str, what: str) -> str:
    """Return `value` if it may stand between two dots, else raise SubjectError naming it."""
    if not _TOKEN.match(value):
        raise SubjectError(f"{what} {value!r} cannot be part of a subject: use 1 to 64 of A-Z a-z 0-9 _ -")
    return value


def is_token(value: str) -> bool:
    """Return True if `value` may stand between two dots."""
    return bool(_TOKEN.match(value))


def moved_class(request_class: str) -> RequestClass:
    return "rb" if request_class in BATCH_CLASSES else "re"


def slug(name: str, *, length: int = 40) -> str:
    """Return a readable token for any name; different names may share a slug."""
    return _NOT_TOKEN.sub("-", name.lower()).strip("-")[:length] or "x"


@lru_cache(maxsize=4096)
def pool_id(model: str, namespace: str = "default") -> str:
    """Return the pool id of a served model in a namespace: slug plus 8 hex digits, so that `a/b` and `a_b` differ."""
    if not model:
        raise SubjectError("a model needs a name, got ''")
    digest = hashlib.sha256(f"{namespace}\0{model}".encode()).hexdigest()[:8]
    return f"{slug(model)}-{digest}"


@lru_cache(maxsize=4096)
def tenant_token(tenant: str) -> str:
    """Return a tenant as a subject token. Names that are not tokens get a hash, so that two tenants never share one.

    So do names that look like such a token, or a client could name the token of another tenant.
    """
    if not tenant:
        return DEFAULT_TENANT
    if _TOKEN.match(tenant) and len(tenant) <= 49 and not _HASHED.search(tenant):
        return tenant
    return f"{slug(tenant, length=24)}-{hashlib.sha256(tenant.encode()).hexdigest()[:24]}"


def tenant_owner(tenant: str) -> str:
    """Return the owner under which the usage of a tenant, given as its token, is counted."""
    return f"t-{tenant}"


@lru_cache(maxsize=4096)
def _request(pool: str, request_class: RequestClass, tenant: str) -> str:
    """Return the subject of a request, without the prefix."""
    if request_class not in REQUEST_CLASSES:
        raise SubjectError(f"request class {request_class!r} is not one of {', '.join(REQUEST_CLASSES)}")
    return f"req.{check_token(pool, 'pool')}.{request_class}.{check_token(tenant, 'tenant')}"


class RequestSubject(NamedTuple):
    pool: str
    request_class: RequestClass
    tenant: str


class JobSubject(NamedTuple):
    model_slug: str
    tenant: str


class WorkerSubject(NamedTuple):
    pool: str
    worker: str


@lru_cache(maxsize=4096)
def said_by(subject: str) -> WorkerSubject:
    """Return the worker that a subject to an ingress names as its sender (`Subjects.from_workers`)."""
    _, _, _, pool, worker = subject.split(".")
    return WorkerSubject(pool, worker)


@dataclass(frozen=True, slots=True)
class Subjects:
    """Names of one deployment. `prefix` separates deployments (and tests) that share a server.

    `speaker`: the worker whose pool and id appear in the subjects of its messages to ingresses and other workers, set where its
    login may publish only as this worker, or as a worker of its pool.
    """

    prefix: str = "hr"
    speaker: WorkerSubject | None = None

    def __post_init__(self) -> None:
        check_token(self.prefix, "prefix")
        if self.speaker is not None:
            check_token(self.speaker.pool, "pool")
            check_token(self.speaker.worker, "worker")

    def spoken_by(self, pool: str, worker: str) -> Subjects:
        return replace(self, speaker=WorkerSubject(pool, worker))

    # Work:

    def req(self, pool: str, request_class: RequestClass, tenant: str = DEFAULT_TENANT) -> str:
        return f"{self.prefix}.{_request(pool, request_class, tenant)}"

    def req_filter(self, pool: str, request_class: RequestClass) -> str:
        return f"{self.prefix}.req.{check_token(pool, 'pool')}.{request_class}.*"

    def req_filter_all(self, pool: str) -> str:
        return f"{self.prefix}.req.{check_token(pool, 'pool')}.>"

    def parse_req(self, subject: str) -> RequestSubject:
        pool, request_class, tenant = self._parse(subject, "req", 3)
        if request_class not in REQUEST_CLASSES:
            raise SubjectError(f"{subject!r} names no known request class")
        return RequestSubject(pool, request_class, tenant)

    def work(self, pool: str, worker: str) -> str:
        return f"{self.prefix}.work.{check_token(pool, 'pool')}.{check_token(worker, 'worker')}"

    def work_filter(self, pool: str) -> str:
        return f"{self.prefix}.work.{check_token(pool, 'pool')}.*"

    def parse_work(self, subject: str) -> WorkerSubject:
        return WorkerSubject(*self._parse(subject, "work", 2))

    def prefill(self, pool: str, worker: str | None = None) -> str:
        base = f"{self.prefix}.prefill.{check_token(pool, 'pool')}"
        return base if worker is None else f"{base}.{check_token(worker, 'worker')}"

    # Durable work:

    def job(self, model_slug: str, tenant: str = DEFAULT_TENANT) -> str:
        """Return the subject of stored jobs for the models of this slug (see `slug`), in all namespaces."""
        return f"{self.prefix}.job.{check_token(model_slug, 'model slug')}.{check_token(tenant, 'tenant')}"

    def job_filter(self, model_slug: str) -> str:
        return f"{self.prefix}.job.{check_token(model_slug, 'model slug')}.*"

    def all_jobs(self) -> str:
        return f"{self.prefix}.job.*.*"

    def parse_job(self, subject: str) -> JobSubject:
        return JobSubject(*self._parse(subject, "job", 2))

    def result(self, tenant: str, job: str) -> str:
        return f"{self.prefix}.result.{check_token(tenant, 'tenant')}.{check_token(job, 'job')}"

    def rsp(self, tenant: str, job: str) -> str:
        return f"{self.prefix}.rsp.{check_token(tenant, 'tenant')}.{check_token(job, 'job')}"

    def job_events(self, tenant: str, job: str) -> str:
        """Return the core subject on which the progress and the end of a job are published once."""
        return f"{self.prefix}.jobev.{check_token(tenant, 'tenant')}.{check_token(job, 'job')}"

    def kv(self, pool: str, place: str) -> str:
        """Return the subject of the cache events of a worker, or of one of its data-parallel ranks (`<worker>~<rank>`)."""
        worker, mark, rank = place.partition("~")
        if mark and not rank.isdecimal():
            raise SubjectError(f"place {place!r} has no rank behind its `~`")
        return f"{self.prefix}.kv.{check_token(pool, 'pool')}.{check_token(worker, 'worker')}{mark}{rank}"

    def kv_filter(self, pool: str) -> str:
        return f"{self.prefix}.kv.{check_token(pool, 'pool')}.*"

    def route(self, pool: str) -> str:
        return f"{self.prefix}.route.{check_token(pool, 'pool')}"

    def load(self, pool: str, worker: str) -> str:
        return f"{self.prefix}.load.{check_token(pool, 'pool')}.{check_token(worker, 'worker')}"

    def load_filter(self, pool: str) -> str:
        return f"{self.prefix}.load.{check_token(pool, 'pool')}.*"

    def dlq(self, pool: str) -> str:
        return f"{self.prefix}.dlq.{check_token(pool, 'pool')}"

    # Core:

    def out(self, ingress: str) -> str:
        return f"{self.prefix}.out.{check_token(ingress, 'ingress')}{self._by()}"

    def from_workers(self, to_ingress: str) -> str:
        """Return the pattern of subjects that name their worker and reach an ingress (`out` and `judge`)."""
        return f"{to_ingress}.*.*"

    def events(self, pool: str) -> str:
        return f"{self.prefix}.ev.{check_token(pool, 'pool')}"

    def events_filter(self) -> str:
        return f"{self.prefix}.ev.*"

    def refused(self, pool: str) -> str:
        """Return the subject on which ingresses report requests that they refused."""
        return f"{self.prefix}.refused.{check_token(pool, 'pool')}"

    def refused_filter(self) -> str:
        return f"{self.prefix}.refused.*"

    def judge(self, ingress: str) -> str:
        """Return the subject of requests from workers, routers and other ingresses to an ingress."""
        return f"{self.prefix}.judge.{check_token(ingress, 'ingress')}{self._by()}"

    def control(self, component: str) -> str:
        """Return the subject of commands to a worker or router. Where workers log in they have another one."""
        if self.speaker is not None:
            return self.peer(self.speaker.pool, component)
        return f"{self.prefix}.ctl.{check_token(component, 'component')}"

    def own_control(self, component: str) -> str:
        """Return the subject on which a worker or router listens to ingresses, routers and operators."""
        return f"{self.prefix}.ctl.{check_token(component, 'component')}"

    def peer(self, pool: str, worker: str) -> str:
        """Return the subject of requests from other workers of the pool to a worker."""
        return f"{self.prefix}.peer.{check_token(pool, 'pool')}.{check_token(worker, 'worker')}"

    def operate_worker(self, pool: str, worker: str) -> str:
        """Return the subject of operators' commands to a worker."""
        return f"{self.prefix}.adm.worker.{check_token(pool, 'pool')}.{check_token(worker, 'worker')}"

    def quota(self, owner: str, kind: str, window: int) -> str:
        """Return the subject of a usage counter of a key or a tenant in one time window."""
        return f"{self.prefix}.quota.{check_token(owner, 'owner')}.{check_token(kind, 'kind')}.{window}"

    def of_tenant(self, tenant: str) -> dict[str, str]:
        """Return the filter of a tenant's messages in each stream whose subjects name the tenant, by kind of stream."""
        token, p = check_token(tenant, "tenant"), self.prefix
        return {
            "JOB": f"{p}.job.*.{token}",
            "REQ": f"{p}.req.*.*.{token}",
            "MOVED": f"{p}.req.*.*.{token}",
            "RSP": f"{p}.rsp.{token}.*",
            "RESULT": f"{p}.result.{token}.*",
            "QUOTA": f"{p}.quota.{tenant_owner(token)}.*.*",
            "AUDIT": self.audit_record(token),
        }

    def tenant_of(self, subject: str) -> str | None:
        parts = subject.split(".")
        if parts[0] != self.prefix or len(parts) < 2:
            return None
        place = {"req": (5, 4), "job": (4, 3)}.get(parts[1])
        return parts[place[1]] if place is not None and len(parts) == place[0] else None

    def all_dead_letters(self) -> str:
        return f"{self.prefix}.dlq.>"

    def all_placements(self) -> str:
        return f"{self.prefix}.route.*"

    def audit(self) -> str:
        """Return the subject on which operators' commands are reported to frontends for the audit log."""
        return f"{self.prefix}.audit"

    def audit_record(self, tenant: str) -> str:
        """Return the subject of audit records of a tenant's requests."""
        return f"{self.prefix}.audit.{check_token(tenant, 'tenant')}"

    def audit_records(self) -> str:
        return f"{self.prefix}.audit.*"

    def quota_open(self) -> str:
        """Return the subject on which frontends exchange their numbers of open requests, by owner."""
        return f"{self.prefix}.quota.open"

    def cancel(self, pool: str) -> str:
        return f"{self.prefix}.cancel.{check_token(pool, 'pool')}"

    def cancel_jobs(self) -> str:
        """Return the subject on which carriers hear of cancelled jobs, by their ids inside Headrace."""
        return f"{self.prefix}.cancel.jobs"

    def find(self, pool: str) -> str:
        return f"{self.prefix}.find.{check_token(pool, 'pool')}"

    # Streams, consumers, buckets:

    def stream(self, kind: str) -> str:
        return f"{self.prefix.upper()}_{kind}"

    def bucket(self, kind: str) -> str:
        """Return the full name of a bucket or object store (`members`, `models`, …), for example `hr_members`."""
        return f"{self.prefix}_{kind}"

    def pool_bucket(self, kind: str, pool: str) -> str:
        return f"{self.bucket(kind)}-{pool}"

    def all_of(self, kind: str) -> str:
        """Return the filter for all subjects of this kind (`req`, `work`, `job`)."""
        return f"{self.prefix}.{kind}.>"

    def req_consumer(self, pool: str, request_class: RequestClass) -> str:
        return f"REQ_{check_token(pool, 'pool')}_{request_class}"

    def work_consumer(self, worker: str, secret: str = "") -> str:
        """Return the consumer of one worker's work. With a secret in it, only that worker can pull from it.

        A login may pull from every consumer of a stream whose name it knows.
        """
        return f"W_{check_token(worker, 'worker')}{_HIDDEN_MARK if secret else ''}{secret}"

    def work_consumer_owner(self, consumer: str) -> str:
        return consumer.removeprefix("W_").partition(_HIDDEN_MARK)[0]

    def job_consumer(self, model_slug: str) -> str:
        return f"JOB_{check_token(model_slug, 'model slug')}"

    def prefill_consumer(self, pool: str, worker: str | None = None, secret: str = "") -> str:
        """Return the consumer of the jobs for any prefill worker of a pool, or of those for this one.

        With a secret in it, only those pull from it that know the secret, as from `work_consumer`.
        """
        name = f"P_{check_token(pool, 'pool')}" if worker is None else f"P_{check_token(worker, 'worker')}_own"
        return f"{name}{_HIDDEN_MARK if secret else ''}{secret}"

    # Keys of the members bucket:

    def worker_key(self, pool: str, worker: str) -> str:
        return f"worker.{check_token(pool, 'pool')}.{check_token(worker, 'worker')}"

    def router_key(self, pool: str, router: str) -> str:
        return f"router.{check_token(pool, 'pool')}.{check_token(router, 'router')}"

    def ingress_key(self, ingress: str) -> str:
        return f"ingress.{check_token(ingress, 'ingress')}"

    def _by(self) -> str:
        return f".{self.speaker.pool}.{self.speaker.worker}" if self.speaker is not None else ""

    def _parse(self, subject: str, kind: str, n: int) -> list[str]:
        parts = subject.split(".")
        if len(parts) != n + 2 or parts[0] != self.prefix or parts[1] != kind:
            raise SubjectError(f"{subject!r} is no {self.prefix}.{kind} subject with {n} tokens")
        return [check_token(p, "token") for p in parts[2:]]
