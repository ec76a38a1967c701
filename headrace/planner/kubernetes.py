"""Carries plans out on Kubernetes: its API, the scaled objects and their pods, and the errors of these."""

from __future__ import annotations

import asyncio
import contextlib
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
    """There is no connection to the API server, or its certificate is of another authority."""


class OutcomeUnknown(KubernetesError):
    """A change was sent and its answer did not come. Its outcome is seen at the next look, and is not assumed."""


class ApiRefused(KubernetesError):
    """The API server has refused."""

    def __init__(self, message: str, *, status: int) -> None:
        super().__init__(message)
        self.status = status


class AccessDenied(ApiRefused):
    """The service account may not do this: 401 or 403."""


class ObjectMissing(ApiRefused):
    """The object does not exist: 404."""


class ChangedMeanwhile(ApiRefused):
    """The object has another version than the one that was read: 409."""


class AnswerUnreadable(KubernetesError):
    """The answer of the API server is not one of this API."""


class NotScalable(KubernetesError):
    """The object is not there, is there twice, is at its bound, or does not hold the worker."""


# Asks the Kubernetes API over HTTPS with the token of a service account, one request for each connection.
#
# Tokens are read for each request, because Kubernetes replaces them while the process runs. Nothing but HTTPS is spoken, and
# only to a server that the given CA vouches for.

ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")  # where Kubernetes mounts it
TIMEOUT_S = 10.0
MOST_BYTES = 32 * 1024 * 1024
MERGE = "application/merge-patch+json"
_KINDS: dict[int, type[ApiRefused]] = {401: AccessDenied, 403: AccessDenied, 404: ObjectMissing, 409: ChangedMeanwhile}
T = TypeVar("T")


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

    async def get(self, path: str, kind: type[T]) -> T:
        """Return an object or a list."""
        data = await self._ask("GET", path, None)
        try:
            return msgspec.json.decode(data, type=kind)
        except msgspec.MsgspecError as error:
            raise AnswerUnreadable(f"GET {path} answered with no {kind.__name__}: {error}") from error

    async def patch(self, path: str, change: Mapping[str, Any]) -> None:
        """Merge a change into an object. With a `resourceVersion` only that version is changed."""
        await self._ask("PATCH", path, msgspec.json.encode(change))

    async def _ask(self, method: str, path: str, body: bytes | None) -> bytes:
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
        if status < 300:
            return data
        try:
            told = msgspec.json.decode(data, type=dict[str, Any])
        except msgspec.MsgspecError:
            told = {}
        why = str(told.get("message") or told.get("reason") or "no reason given")[:300]
        raise _KINDS.get(status, ApiRefused)(f"{method} {path} answered {status}: {why}", status=status)


# Finds the object that Kubernetes scales for a pool and role, and reads its number and pods.
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


class Meta(msgspec.Struct, kw_only=True, rename="camel"):
    """The metadata of an object, as far as it matters here."""

    name: str
    annotations: dict[str, str] = {}
    resource_version: str = ""
    deletion_timestamp: str | None = None


class _Spec(msgspec.Struct):
    replicas: int = 0  # a number that is not sent is 0


class _Status(msgspec.Struct):
    phase: str = ""
    selector: str = ""


class Object(msgspec.Struct, kw_only=True):
    """A pod, an object that is scaled, or its scale: how many there shall be, and which pods they are."""

    metadata: Meta
    spec: _Spec = msgspec.field(default_factory=_Spec)
    status: _Status = msgspec.field(default_factory=_Status)

    @property
    def name(self) -> str:
        return self.metadata.name


class Objects(msgspec.Struct):
    items: list[Object] = []


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
            listed = await api.get(f"{folder}?labelSelector={quote(f'{ROLE}={role}')}", Objects)
        except ObjectMissing:
            continue  # the cluster has no such kind of object
        for one in listed.items:
            told = one.metadata.annotations
            if told.get(POOL) == pool:
                least, most = _bound(told, LEAST, 0), _bound(told, MOST, 1_000_000)
                path, by_cost = f"{folder}/{quote(one.name)}", kind == "deployments"
                found.append(Scaled(path=path, name=one.name, least=least, most=most, by_cost=by_cost))
    if len(found) != 1:
        names = ", ".join(one.name for one in found)
        raise NotScalable(f"{'several objects' if found else 'no object'} with {POOL}={pool} and {ROLE}={role} {names}".strip())
    return found[0]


def _bound(annotations: dict[str, str], name: str, default: int) -> int:
    try:
        return int(annotations.get(name, default))
    except ValueError:
        raise NotScalable(f"{name}={annotations[name]!r} is no number") from None


async def read_scale(api: KubernetesApi, scaled: Scaled) -> tuple[Object, dict[str, Object]]:
    """Return the scale of an object, and its pods by name."""
    scale = await api.get(f"{scaled.path}/scale", Object)
    if not scale.status.selector:
        raise AnswerUnreadable(f"{scaled.path}/scale names no selector of its pods")
    selector = quote(scale.status.selector, safe="")
    pods = await api.get(f"/api/v1/namespaces/{quote(api.namespace)}/pods?labelSelector={selector}", Objects)
    return scale, {one.name: one for one in pods.items}


def staying(pods: Mapping[str, Object], hosts: Collection[str]) -> list[Object]:
    """Return the pods that are hosts, unless they are ending or have ended."""
    return [
        one
        for name, one in pods.items()
        if name in hosts and one.metadata.deletion_timestamp is None and one.status.phase not in ("Failed", "Succeeded")
    ]


# Carries a plan out on Kubernetes: more workers by the scale of an object, fewer by that and the deletion cost of the
# victims.
#
# A request is for a number and never for "one more": it follows from the pods that are workers, those that are coming and
# the starts of the plan. A start whose pod waits for a machine is not asked for twice, and a change whose answer was lost is
# not made twice. A pod that leaves gets SIGTERM, which is a worker's drain.

log = structlog.get_logger()

FIRST_TO_GO = "-1000"
TRIES = 2  # of a change whose object was changed meanwhile: each reads anew


class KubernetesScaler:
    """Starts and stops workers of a namespace. Raises the KubernetesError family; nothing is repeated but a conflict, once."""

    def __init__(self, api: KubernetesApi, members: Callable[[], Awaitable[Sequence[WorkerMember]]]) -> None:
        """`members`: reads the workers that are there."""
        self._api = api
        self._members = members

    async def start(self, plan: Plan, role: str) -> str:
        """Have as many workers of a role as the plan starts, and return what is scaled. Called again it changes nothing."""
        asked = plan.starting.get(role, 0) + sum(one.kind == "start" and one.role == role for one in plan.actions)

        async def change(scaled: Scaled) -> None:
            scale, pods = await read_scale(self._api, scaled)
            coming = max(0, scale.spec.replicas - len(staying(pods, {one.host for one in await self._members()})))
            wanted = min(scale.spec.replicas + max(0, asked - coming), scaled.most)
            if wanted > scale.spec.replicas:
                await self._set(scaled, scale, wanted)
            elif coming < asked:  # else they are coming, or wait for a machine
                raise NotScalable(f"{scaled.name} has {scale.spec.replicas} and may have {scaled.most}")

        return await self._unless_changed(plan, role, change)

    async def leave(self, plan: Plan, role: str, workers: Sequence[str]) -> None:
        """Have these workers leave."""

        async def change(scaled: Scaled) -> None:
            hosts = {one.worker: one.host for one in await self._members()}
            scale, pods = await read_scale(self._api, scaled)
            for worker in workers:
                if hosts.get(worker) not in pods:
                    host = hosts.get(worker, "unknown")
                    raise NotScalable(f"worker {worker} is no pod of {scaled.name}: its host is {host!r}")
            going = {hosts[worker] for worker in workers}
            here = staying(pods, set(hosts.values()))
            wanted = sum(one.name not in going for one in here)
            if wanted < scaled.least:
                raise NotScalable(f"{scaled.name} may not have fewer than {scaled.least}")
            if wanted >= scale.spec.replicas:
                return  # they leave already
            marked = set()
            for pod in here if scaled.by_cost else ():  # marks of a change that was never made are taken back
                leaves, cost = pod.name in going, pod.metadata.annotations.get(DELETION_COST)
                if leaves != (cost == FIRST_TO_GO):
                    await self._mark(pod.name, FIRST_TO_GO if leaves else None)
                if leaves:
                    marked.add(pod.name)
            try:
                await self._set(scaled, scale, wanted)
            except KubernetesError:
                for name in marked:
                    try:
                        await self._mark(name, None)
                    except KubernetesError as error:  # it is taken back before the next choice
                        log.warning("planner.mark_remains", pod=name, error=str(error))
                raise

        await self._unless_changed(plan, role, change)

    async def _set(self, scaled: Scaled, scale: Object, replicas: int) -> None:
        """Change the number of the version that was read. Raises ChangedMeanwhile for another one."""
        meta = {"resourceVersion": scale.metadata.resource_version}
        await self._api.patch(f"{scaled.path}/scale", {"metadata": meta, "spec": {"replicas": replicas}})
        log.info("planner.scaled", object=scaled.name, replicas=replicas, before=scale.spec.replicas)

    async def _mark(self, pod: str, cost: str | None) -> None:
        """Set what the end of a pod costs; None takes it back. A pod that is gone needs no mark."""
        change = {"metadata": {"annotations": {DELETION_COST: cost}}}
        with contextlib.suppress(ObjectMissing):
            await self._api.patch(f"/api/v1/namespaces/{quote(self._api.namespace)}/pods/{quote(pod)}", change)

    async def _unless_changed(self, plan: Plan, role: str, change: Callable[[Scaled], Awaitable[None]]) -> str:
        scaled = await find_scaled(self._api, plan.pool, role)
        for tried in range(1, TRIES + 1):
            try:
                await change(scaled)
                break
            except ChangedMeanwhile:
                if tried == TRIES:
                    raise
        return scaled.name
