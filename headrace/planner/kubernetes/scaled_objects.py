"""Finds what Kubernetes scales for a pool and role, and reads its number and pods.

A Deployment or LeaderWorkerSet belongs to a pool by its annotation `plan.headrace/pool` (the pool as the planner names it) and
its label `plan.headrace/role`. `plan.headrace/least` and `plan.headrace/most` bound it. Its scale names the selector of its
pods, and a worker is the pod whose name it gives as its host.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec

from headrace.planner.kubernetes.api import KubernetesApi
from headrace.planner.kubernetes.errors import AnswerUnreadable, NotScalable, ObjectMissing

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
    """A pod."""

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
    """Return the scale of an object, and its pods."""
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
    """Return the pods that are workers and stay."""
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
