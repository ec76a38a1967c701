"""Carries plans out on Kubernetes: its API, the scaled objects and their pods, and the errors of these.

CommandError
└── KubernetesError
    ├── ApiUnreachable      no connection, or a certificate of another authority: nothing was changed
    ├── OutcomeUnknown      a change was sent and no answer came: it may have been made
    ├── AccessDenied        401, 403: the service account lacks a right
    ├── ObjectMissing       404
    ├── ChangedMeanwhile    409: the object has another version by now
    ├── ApiRefused          any other refusal; `status` has its code
    ├── AnswerUnreadable    the answer is not what the API is described to send
    └── NotScalable         the object is not there, is there twice, is at its bound, or does not hold the worker
"""

from __future__ import annotations

import asyncio
import os
import ssl
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import structlog

from headrace.base.errors import CommandError
from headrace.base.http_client import NoConnection, ask
from headrace.broker.messages.members import WorkerMember
from headrace.planner.plan import Plan


class KubernetesError(CommandError):
    """Kubernetes cannot do what was asked. Nothing was changed, unless the class says otherwise."""


class ApiUnreachable(KubernetesError):
    """The API server cannot be reached."""


class OutcomeUnknown(KubernetesError):
    """A change was sent and its answer did not come. What became of it is seen at the next look, and is not assumed."""


class ApiRefused(KubernetesError):
    """The API server has refused."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class AccessDenied(ApiRefused):
    """The service account may not do this."""


class ObjectMissing(ApiRefused):
    """The object does not exist."""


class ChangedMeanwhile(ApiRefused):
    """The object has another version than the one that was read."""


class AnswerUnreadable(KubernetesError):
    """The answer of the API server is not one of this API."""


class NotScalable(KubernetesError):
    """No object, or no single one, can be scaled for this pool and role as was asked."""


# Asks the Kubernetes API over HTTPS with the token of a service account, one request for each connection.
#
# Tokens are read for each request, because Kubernetes replaces them while the process runs. Nothing but HTTPS is spoken, and
# only to a server that the given CA vouches for.

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts it
TIMEOUT_S = 10.0
MOST_BYTES = 32 * 1024 * 1024
MERGE = "application/merge-patch+json"
_KINDS: dict[int, type[ApiRefused]] = {401: AccessDenied, 403: AccessDenied, 404: ObjectMissing, 409: ChangedMeanwhile}


class KubernetesApi:
    """The API as one service account sees it. Raises the KubernetesError family."""

    def __init__(self, host: str, port: int, *, account: Path = ACCOUNT, timeout_s: float = TIMEOUT_S) -> None:
        """`account`: the folder with `token`, `ca.crt` and `namespace`. Raises OSError for one that has none."""
        self._url = f"https://[{host}]:{port}" if ":" in host else f"https://{host}:{port}"
        self._token_file = account / "token"
        self._tls = ssl.create_default_context(cafile=str(account / "ca.crt"))
        self._timeout_s = timeout_s
        self.namespace = (account / "namespace").read_text().strip()
        self._token_file.read_text()

    @classmethod
    def of_this_pod(cls, env: Mapping[str, str] = os.environ, account: Path = ACCOUNT) -> KubernetesApi:
        """Return the API of the cluster that this process runs in. Raises ApiUnreachable outside of one."""
        host, port = env.get("KUBERNETES_SERVICE_HOST", ""), env.get("KUBERNETES_SERVICE_PORT_HTTPS", "443")
        if not host:
            raise ApiUnreachable("this process runs in no cluster: KUBERNETES_SERVICE_HOST is not set")
        try:
            return cls(host, int(port), account=account)
        except (OSError, ValueError) as error:
            raise ApiUnreachable(f"the service account in {account} cannot be used: {error}") from error

    async def get(self, path: str) -> dict[str, Any]:
        """Return an object or a list."""
        return await self._ask("GET", path, None)

    async def patch(self, path: str, change: Mapping[str, Any]) -> dict[str, Any]:
        """Merge a change into an object and return it. With a `resourceVersion` only that version is changed."""
        return await self._ask("PATCH", path, msgspec.json.encode(change))

    async def _ask(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        headers = {"Accept": "application/json", "Authorization": f"Bearer {self._token_file.read_text().strip()}"}
        if body is not None:
            headers["Content-Type"] = MERGE
        asking = ask(method, self._url + path, headers=headers, body=body, tls=self._tls, connect_s=self._timeout_s)
        try:
            async with asyncio.timeout(2 * self._timeout_s), asking as answer:
                status, data = answer.status, await answer.body(MOST_BYTES)
        except NoConnection as error:
            raise ApiUnreachable(f"{self._url} cannot be reached: {error}") from error
        except OSError as error:
            kind = ApiUnreachable if body is None else OutcomeUnknown
            raise kind(f"{method} {path} had no answer: {type(error).__name__} {error}") from error
        return _answer(method, path, status, data)


def _answer(method: str, path: str, status: int, data: bytes) -> dict[str, Any]:
    try:
        body = msgspec.json.decode(data, type=dict[str, Any])
    except msgspec.MsgspecError as error:
        if status < 300:
            raise AnswerUnreadable(f"{method} {path} answered {status} with no object: {error}") from error
        body = {}
    if status < 300:
        return body
    why = str(body.get("message") or body.get("reason") or "no reason given")[:300]
    raise _KINDS.get(status, ApiRefused)(f"{method} {path} answered {status}: {why}", status=status)


# Finds what Kubernetes scales for a pool and role, and reads its number and pods.
#
# A Deployment or LeaderWorkerSet belongs to a pool by its annotation `plan.headrace/pool` (the pool as the planner names it)
# and its label `plan.headrace/role`. `plan.headrace/least` and `plan.headrace/most` bound it. Its scale names the selector of
# its pods, and a worker is the pod whose name it gives as its host.

POOL = "plan.headrace/pool"
LEAST = "plan.headrace/least"
MOST = "plan.headrace/most"
ROLE = "plan.headrace/role"
DELETION_COST = "controller.kubernetes.io/pod-deletion-cost"
KINDS = (("apps/v1", "deployments"), ("leaderworkerset.x-k8s.io/v1", "leaderworkersets"))


T = TypeVar("T")


class Meta(msgspec.Struct, kw_only=True, rename="camel"):
    """The metadata of an object, as far as it matters here."""

    name: str
    annotations: dict[str, str] = {}
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Phase(msgspec.Struct, kw_only=True):
    phase: str = ""


class Pod(msgspec.Struct, kw_only=True):
    metadata: Meta
    status: _Phase = msgspec.field(default_factory=_Phase)

    @property
    def stays(self) -> bool:
        """True unless it is ending or has ended."""
        return self.metadata.deletion_timestamp is None and self.status.phase not in ("Failed", "Succeeded")


class _Spec(msgspec.Struct, kw_only=True):
    replicas: int = 0


class _Status(msgspec.Struct, kw_only=True):
    selector: str


class Scale(msgspec.Struct, kw_only=True):
    """The scale subresource: how many there shall be, and which pods they are."""

    metadata: Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)  # a number that is not sent is 0
    status: _Status


class _Object(msgspec.Struct, kw_only=True):
    metadata: Meta


class _Objects(msgspec.Struct, kw_only=True):
    items: list[_Object] = []


class _Pods(msgspec.Struct, kw_only=True):
    items: list[Pod] = []


class Scaled(msgspec.Struct, frozen=True, kw_only=True):
    """An object that is scaled for a pool and role: its path, and its bounds."""

    path: str
    name: str
    least: int
    most: int
    by_cost: bool  # its pods leave by their deletion cost


async def find_scaled(api: KubernetesApi, pool: str, role: str) -> Scaled:
    """Return the one object for a pool and role. Raises NotScalable for none or several."""
    found: list[Scaled] = []
    for version, kind in KINDS:
        folder = f"/apis/{version}/namespaces/{quote(api.namespace)}/{kind}"
        try:
            read = _as(_Objects, await api.get(f"{folder}?labelSelector={quote(f'{ROLE}={role}')}"))
        except ObjectMissing:
            continue  # the cluster has no such kind of object
        for one in read.items:
            told = one.metadata.annotations
            if told.get(POOL) == pool:
                least, most = _bound(told, LEAST, 0), _bound(told, MOST, 1_000_000)
                found.append(
                    Scaled(
                        path=f"{folder}/{quote(one.metadata.name)}",
                        name=one.metadata.name,
                        least=least,
                        most=most,
                        by_cost=kind == "deployments",
                    )
                )
    if len(found) != 1:
        names = ", ".join(one.name for one in found)
        raise NotScalable(f"{'several objects' if found else 'no object'} with {POOL}={pool} and {ROLE}={role} {names}".strip())
    return found[0]


async def read_scale(api: KubernetesApi, scaled: Scaled) -> tuple[Scale, list[Pod]]:
    scale = _as(Scale, await api.get(f"{scaled.path}/scale"))
    selector = quote(scale.status.selector, safe="")
    pods = _as(_Pods, await api.get(f"/api/v1/namespaces/{quote(api.namespace)}/pods?labelSelector={selector}"))
    return scale, pods.items


async def set_replicas(api: KubernetesApi, scaled: Scaled, scale: Scale, replicas: int) -> None:
    """Change the number of one version. Raises ChangedMeanwhile for another one."""
    meta = {"resourceVersion": scale.metadata.resource_version}
    await api.patch(f"{scaled.path}/scale", {"metadata": meta, "spec": {"replicas": replicas}})


async def set_cost(api: KubernetesApi, pod: str, cost: str | None) -> None:
    """Set what the end of a pod costs; None takes it back."""
    change = {"metadata": {"annotations": {DELETION_COST: cost}}}
    await api.patch(f"/api/v1/namespaces/{quote(api.namespace)}/pods/{quote(pod)}", change)


def staying(pods: Collection[Pod], hosts: Collection[str]) -> list[Pod]:
    return [one for one in pods if one.stays and one.metadata.name in hosts]


def _bound(annotations: dict[str, str], name: str, default: int) -> int:
    try:
        return int(annotations.get(name, default))
    except ValueError:
        raise NotScalable(f"{name}={annotations[name]!r} is no number") from None


def _as(kind: type[T], body: dict[str, Any]) -> T:
    try:
        return msgspec.convert(body, kind)
    except msgspec.ValidationError as error:
        raise AnswerUnreadable(f"the answer is no {kind.__name__.strip('_')}: {error}") from error


# Carries a plan out on Kubernetes: more workers by the scale of an object, fewer by that and the deletion cost of the
# victims.
#
# What is asked for is a number and never "one more": it follows from the pods that are workers, those that are coming and
# what the plan has asked for. A start whose pod waits for a machine is not asked for twice, and a change whose answer was
# lost is not made twice. A pod that leaves gets SIGTERM, which is a worker's drain.

log = structlog.get_logger()

FIRST_TO_GO = "-1000"
TRIES = 2  # of a change whose object was changed meanwhile: each reads anew
Members = Callable[[], Awaitable[Sequence[WorkerMember]]]


class KubernetesScaler:
    """Starts and stops workers of a namespace. Raises the KubernetesError family; nothing is repeated but a conflict, once."""

    def __init__(self, api: KubernetesApi, members: Members) -> None:
        """`members`: reads the workers that are there."""
        self._api = api
        self._members = members

    async def start(self, plan: Plan, role: str) -> str:
        """Have as many workers of a role as the plan starts, and return what is scaled. Called again it changes nothing."""
        scaled = await find_scaled(self._api, plan.pool, role)
        asked = plan.starting.get(role, 0) + sum(one.kind == "start" and one.role == role for one in plan.actions)

        async def change() -> None:
            scale, pods = await read_scale(self._api, scaled)
            here = staying(pods, {one.host for one in await self._members()})
            coming = max(0, scale.spec.replicas - len(here))
            wanted = min(scale.spec.replicas + max(0, asked - coming), scaled.most)
            if wanted <= scale.spec.replicas:
                if coming < asked:
                    raise NotScalable(f"{scaled.name} has {scale.spec.replicas} and may have {scaled.most}")
                return  # those that were asked for are coming, or wait for a machine
            await set_replicas(self._api, scaled, scale, wanted)
            log.info("planner.scaled", object=scaled.name, replicas=wanted, before=scale.spec.replicas)

        await self._unless_changed(change)
        return scaled.name

    async def leave(self, plan: Plan, role: str, workers: Sequence[str]) -> list[str]:
        """Have these workers leave and return those that do."""
        scaled = await find_scaled(self._api, plan.pool, role)

        async def change() -> None:
            members = await self._members()
            hosts = {one.worker: one.host for one in members}
            scale, pods = await read_scale(self._api, scaled)
            there = {one.metadata.name: one for one in pods}
            for worker in workers:
                if hosts.get(worker) not in there:
                    raise NotScalable(
                        f"worker {worker} is no pod of {scaled.name}: its host is {hosts.get(worker, 'unknown')!r}"
                    )
            going = {hosts[worker] for worker in workers}
            here = staying(pods, set(hosts.values()))
            wanted = sum(one.metadata.name not in going for one in here)
            if wanted < scaled.least:
                raise NotScalable(f"{scaled.name} may not have fewer than {scaled.least}")
            if wanted >= scale.spec.replicas:
                return  # they leave already
            costs = {one.metadata.name: one.metadata.annotations.get(DELETION_COST) for one in here} if scaled.by_cost else {}
            await self._choose(going, costs)
            try:
                await set_replicas(self._api, scaled, scale, wanted)
            except KubernetesError:
                await self._unchoose(going & costs.keys())
                raise
            log.info("planner.scaled", object=scaled.name, replicas=wanted, before=scale.spec.replicas)

        await self._unless_changed(change)
        return list(workers)

    async def _choose(self, going: set[str], costs: dict[str, str | None]) -> None:
        """Mark the pods that are to leave, and take back the marks of a change that was never made."""
        for pod, cost in costs.items():
            wanted = FIRST_TO_GO if pod in going else None
            if (cost == FIRST_TO_GO) == (wanted is not None):
                continue
            try:
                await set_cost(self._api, pod, wanted)
            except ObjectMissing:
                continue  # it is gone

    async def _unchoose(self, pods: set[str]) -> None:
        """Take marks back as far as that works: those that remain are taken back before the next choice."""
        for pod in pods:
            try:
                await set_cost(self._api, pod, None)
            except KubernetesError as error:
                log.warning("planner.mark_remains", pod=pod, error=str(error))

    async def _unless_changed(self, change: Callable[[], Awaitable[None]]) -> None:
        for tried in range(1, TRIES + 1):
            try:
                await change()
                break
            except ChangedMeanwhile:
                if tried == TRIES:
                    raise
