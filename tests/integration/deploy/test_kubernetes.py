"""Manifests, chart and the planner's scaling at a real control plane of Kubernetes, which has no machines."""

from __future__ import annotations

import functools
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from msgspec.structs import replace

from deploy.kubernetes.write import FOLDER, rendered
from headrace.broker.messages.members import WorkerMember
from headrace.planner.kubernetes import (
    KINDS,
    AccessDenied,
    ChangedMeanwhile,
    KubernetesApi,
    KubernetesScaler,
    NotScalable,
    Objects,
    find_scaled,
)
from headrace.planner.plan import Action, Plan
from tests.support.control_plane import ControlPlane, Object, Refused, needs_control_plane, needs_controllers, until
from tests.support.kubernetes_objects import custom_resources, needs_tools
from tests.support.whole_chart import EVERYTHING

pytestmark = [needs_control_plane, needs_tools, pytest.mark.deployment]

# Kubernetes then warns of each pod template, and refuses each pod, that has a right it should not have
RESTRICTED = {f"pod-security.kubernetes.io/{mode}": "restricted" for mode in ("enforce", "warn")}
MERGE = "application/merge-patch+json"
DEPLOYMENTS = "/apis/apps/v1/namespaces/{}/deployments"
WORKERS = "llm-p-aggregated"


def planned(nodes: int = 1) -> Object:
    """Return the values of a pool that the planner scales."""
    role = {"nodes": nodes, "scaling": {"enabled": True, "by": "planner"}}
    pool = {"engine": "sglang-cuda", "model": "org/m", "roles": {"aggregated": role}}
    return {"nats": {"enabled": False}, "planner": {"enabled": True}, "pools": {"p": pool}}


@pytest.fixture(scope="module")
def plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("plane")) as running:
        for one in custom_resources():
            running.apply(one, "")
            path = f"/apis/{one['spec']['group']}/{one['spec']['versions'][0]['name']}/{one['spec']['names']['plural']}"
            until("it is served", functools.partial(_is_served, running, path))
        yield running


@pytest.fixture
def namespace(plane: ControlPlane) -> str:
    name = f"t{secrets.token_hex(4)}"
    plane.apply({"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": RESTRICTED}}, "")
    return name


# -- objects --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("manifest", ["aggregated", "disaggregated", "multi-node"])
def test_plain_manifests_are_admitted_without_a_warning(plane: ControlPlane, namespace: str, manifest: str) -> None:
    assert applied(plane, namespace, [*_read("nats"), *_read(manifest)]) == []


def test_one_rendering_of_the_chart_follows_another_as_an_upgrade(plane: ControlPlane, namespace: str) -> None:
    keda = {"enabled": True, "least": 2}
    plain = {"pools": {"own": {"servedName": "m", "roles": {"aggregated": {}}}, "plain": {"roles": {"aggregated": {}}}}}
    for values in (plain, EVERYTHING, planned(), {"pools": {"p": {"roles": {"aggregated": {"scaling": keda}}}}}, plain):
        assert applied(plane, namespace, rendered(values, name="llm", namespace=namespace)) == []


def test_a_field_that_the_api_does_not_know_is_refused(plane: ControlPlane, namespace: str) -> None:
    thing = one_of(rendered(planned(), name="llm", namespace=namespace), "Deployment", WORKERS)
    thing["spec"]["template"]["spec"]["gracePeriod"] = 3
    with pytest.raises(Refused, match="gracePeriod"):
        plane.apply(thing, namespace)


@needs_controllers
def test_pods_of_all_deployments_are_made_under_the_restricted_standard(plane: ControlPlane, namespace: str) -> None:
    things = rendered(EVERYTHING | {"nats": {"enabled": False}}, name="llm", namespace=namespace)
    applied(plane, namespace, things)
    named = sorted(one["metadata"]["name"] for one in things if one["kind"] == "Deployment")
    assert WORKERS.replace("-p-", "-own-") in named

    def have_pods() -> bool:
        found = plane.ask("GET", DEPLOYMENTS.format(namespace))["items"]
        made = {one["metadata"]["name"]: one["status"].get("replicas", 0) == one["spec"]["replicas"] > 0 for one in found}
        return sorted(made) == named and all(made.values())

    until("each Deployment has its pods", have_pods)


# -- the planner ----------------------------------------------------------------------------------------------------------


class Site:
    """A deployment with a pool that the planner scales, seen with the rights that the chart gives the planner."""

    def __init__(self, plane: ControlPlane, namespace: str, folder: Path, *, nodes: int = 1) -> None:
        self.plane, self.namespace = plane, namespace
        applied(plane, namespace, rendered(planned(nodes), name="llm", namespace=namespace))
        self.joined: list[str] = []  # pods whose workers serve
        self.account = plane.account("llm-planner", namespace, folder / "account")
        self.api = Api("127.0.0.1", plane.port, account=self.account)
        self.scaler = KubernetesScaler(self.api, self.members)
        version, kind = KINDS[nodes > 1]
        self.path = f"/apis/{version}/namespaces/{namespace}/{kind}/{WORKERS}"
        told = self.plane.ask("GET", self.path)["metadata"]["annotations"]
        self.plan = Plan(
            at=0.0,
            model="m",
            pool=told["plan.headrace/pool"],
            reason="forecast",
            desired={},
            supply={},
            actions=(),
            starting={},
        )

    @property
    def replicas(self) -> int:
        found: int = self.plane.ask("GET", self.path)["spec"]["replicas"]
        return found

    def scaled_by_hand(self, replicas: int) -> None:
        self.plane.ask("PATCH", f"{self.path}/scale", {"spec": {"replicas": replicas}}, content=MERGE)

    async def start(self, workers: int) -> None:
        actions = (Action(kind="start", role="aggregated"),) * workers
        await self.scaler.start(replace(self.plan, actions=actions), "aggregated")

    def pods(self) -> dict[str, Object]:
        selector = "labelSelector=app.kubernetes.io/component%3Dworker-p-aggregated"
        found = self.plane.ask("GET", f"/api/v1/namespaces/{self.namespace}/pods?{selector}")["items"]
        return {one["metadata"]["name"]: one for one in found}

    def run_pods(self, count: int) -> list[str]:
        """Have the pods run and be ready, as a kubelet does that is told of them, and return their names."""
        names = sorted(until("the pods are made", lambda: len(found := self.pods()) == count and found))
        for name in names:
            path = f"/api/v1/namespaces/{self.namespace}/pods/{name}"
            if "nodeName" not in self.pods()[name]["spec"]:
                target = {"apiVersion": "v1", "kind": "Node", "name": "machine"}
                self.plane.ask(
                    "POST",
                    f"{path}/binding",
                    {"apiVersion": "v1", "kind": "Binding", "metadata": {"name": name}, "target": target},
                )
            status = {"phase": "Running", "conditions": [{"type": "Ready", "status": "True"}]}
            self.plane.ask("PATCH", f"{path}/status", {"status": status}, content="application/strategic-merge-patch+json")
        return names

    async def members(self) -> Sequence[WorkerMember]:
        return [WorkerMember(worker=f"w-{name}", pool="p", model="m", host=name) for name in self.joined]


class Api(KubernetesApi):
    """The planner's client, before whose changes others may change something."""

    quicker: Callable[[], object] | None = None

    async def patch(self, path: str, change: Mapping[str, Any]) -> None:
        if self.quicker is not None and path.endswith("/scale"):
            self.quicker()
        await super().patch(path, change)


@pytest.fixture
def site(plane: ControlPlane, namespace: str, tmp_path: Path) -> Site:
    return Site(plane, namespace, tmp_path)


async def test_the_role_of_the_chart_is_enough_to_scale_and_an_upgrade_keeps_the_number(site: Site) -> None:
    await site.start(3)
    assert site.replicas == 3
    applied(site.plane, site.namespace, rendered(planned() | {"version": "next"}, name="llm", namespace=site.namespace))
    assert site.replicas == 3
    await site.start(9)
    assert site.replicas == 4, "what the chart allows at most"
    with pytest.raises(NotScalable, match="may have 4"):
        await site.start(9)


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("GET", "/api/v1/namespaces/{}/secrets"),
        ("GET", "/api/v1/namespaces/{}/configmaps"),
        ("GET", "/apis/apps/v1/namespaces/{}/deployments/llm-frontend"),
        ("PATCH", "/apis/apps/v1/namespaces/{}/deployments/llm-frontend"),
        ("PATCH", "/apis/apps/v1/namespaces/{}/deployments/llm-frontend/scale"),
        ("PATCH", "/apis/apps/v1/namespaces/{}/statefulsets/llm-nats/scale"),
        ("PATCH", "/api/v1/namespaces/{}/pods/any/status"),
        ("GET", "/api/v1/namespaces/default/pods"),
        ("PATCH", "/apis/apps/v1/namespaces/default/deployments/any/scale"),
        ("GET", "/api/v1/nodes"),
    ],
)
async def test_the_planner_may_not(site: Site, verb: str, path: str) -> None:
    path = path.format(site.namespace)
    asked = site.api.get(path, Objects) if verb == "GET" else site.api.patch(path, {})
    with pytest.raises(AccessDenied, match="403"):
        await asked


@needs_controllers
async def test_kubernetes_ends_the_pods_that_the_planner_chose(site: Site) -> None:
    site.plane.apply({"apiVersion": "v1", "kind": "Node", "metadata": {"name": "machine"}}, "")
    site.scaled_by_hand(4)
    names = site.joined = site.run_pods(4)
    chosen = [f"w-{name}" for name in names[1:3]]
    await site.scaler.leave(site.plan, "aggregated", chosen)
    assert site.replicas == 2

    def ending() -> list[str]:
        return sorted(name for name, one in site.pods().items() if "deletionTimestamp" in one["metadata"])

    assert until("two pods end", lambda: len(found := ending()) == 2 and found) == names[1:3]
    graces = {site.pods()[name]["metadata"]["deletionGracePeriodSeconds"] for name in names[1:3]}
    assert graces == {630}, "the drain, and 30 s"
    await site.scaler.leave(site.plan, "aggregated", chosen)
    assert site.replicas == 2, "they leave already"


async def test_a_pool_whose_object_is_gone_is_told(site: Site) -> None:
    site.plane.ask("DELETE", site.path)
    with pytest.raises(NotScalable, match="no object"):
        await site.start(1)


async def test_a_token_that_is_replaced_is_used_from_then_on(site: Site) -> None:
    (site.account / "token").write_text("worn.out.token")
    with pytest.raises(AccessDenied, match="401"):
        await site.start(3)
    site.plane.account("llm-planner", site.namespace, site.account)
    await site.start(3)
    assert site.replicas == 3


@pytest.fixture
def groups(plane: ControlPlane, namespace: str, tmp_path: Path) -> Site:
    """A pool whose engines have two pods each. Nobody controls their objects, so that nothing but a test changes them."""
    found = Site(plane, namespace, tmp_path, nodes=2)
    status = {"status": {"replicas": 1, "hpaPodSelector": "leaderworkerset.sigs.k8s.io/name=x"}}  # of its controller
    plane.ask("PATCH", f"{found.path}/status", status, content=MERGE)
    return found


async def test_engines_over_several_machines_are_scaled_by_their_group(groups: Site) -> None:
    await groups.start(3)
    assert groups.replicas == 3
    assert not (await find_scaled(groups.api, groups.plan.pool, "aggregated")).by_cost


async def test_a_change_of_another_one_is_read_once_and_then_told(groups: Site) -> None:
    numbers = iter([2])
    groups.api.quicker = lambda: [groups.scaled_by_hand(number) for number in numbers]
    await groups.start(3)
    assert groups.replicas == 3, "two of the three were asked for by another one"
    again = iter([1, 2, 1, 2])
    groups.api.quicker = lambda: groups.scaled_by_hand(next(again))
    with pytest.raises(ChangedMeanwhile):
        await groups.start(4)
    assert groups.replicas == 2


# -- parts ----------------------------------------------------------------------------------------------------------------


def applied(plane: ControlPlane, namespace: str, things: Sequence[Object]) -> list[str]:
    """Apply objects and return the warnings."""
    return [f"{one['kind']}/{one['metadata']['name']}: {text}" for one in things for text in plane.apply(one, namespace)]


def one_of(things: Sequence[Object], kind: str, name: str) -> Object:
    (found,) = (one for one in things if (one["kind"], one["metadata"]["name"]) == (kind, name))
    return found


def _read(name: str) -> list[Object]:
    return list(yaml.safe_load_all((FOLDER / f"{name}.yaml").read_text()))


def _is_served(plane: ControlPlane, path: str) -> bool:
    try:
        return bool(plane.ask("GET", path))
    except Refused:  # 404, and 429 while its storage is made
        return False
