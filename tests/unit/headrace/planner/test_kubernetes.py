"""The client of the Kubernetes API against a fake of it over real TLS. There is no cluster here."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import pytest

from headrace.broker.messages.members import WorkerMember
from headrace.planner.kubernetes import (
    AccessDenied,
    AnswerUnreadable,
    ApiRefused,
    ApiUnreachable,
    ChangedMeanwhile,
    KubernetesApi,
    KubernetesError,
    KubernetesScaler,
    NotScalable,
    Object,
    ObjectMissing,
    Objects,
    OutcomeUnknown,
    find_scaled,
    read_scale,
    staying,
)
from headrace.planner.plan import Action, Plan
from tests.support.kubernetes_api import NAMESPACE, FakeCluster, served

LIST = "/apis/apps/v1/namespaces/llm/deployments?labelSelector=plan.headrace/role%3Ddecode"
SCALE = "/apis/apps/v1/namespaces/llm/deployments/d/scale"


@pytest.fixture
def cluster() -> FakeCluster:
    found = FakeCluster()
    found.deployment("d", pool="p", role="decode", replicas=2)
    return found


@pytest.fixture
def port(cluster: FakeCluster, tmp_path: Path) -> Iterator[int]:
    with served(cluster, tmp_path) as found:
        yield found


async def test_it_reads_and_changes_as_the_service_account(cluster: FakeCluster, port: int, tmp_path: Path) -> None:
    api = KubernetesApi("127.0.0.1", port, account=tmp_path)
    assert api.namespace == "llm"
    assert [one.name for one in (await api.get(LIST, Objects)).items] == ["d"]
    await api.patch(SCALE, {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 5}})
    assert cluster.replicas == {"d": 5}


async def test_a_token_that_was_replaced_is_read_again(cluster: FakeCluster, port: int, tmp_path: Path) -> None:
    api = KubernetesApi("127.0.0.1", port, account=tmp_path)
    cluster.token = "token-2"
    with pytest.raises(AccessDenied):
        await api.get(LIST, Objects)
    (tmp_path / "token").write_text("token-2")
    await api.get(LIST, Objects)


@pytest.mark.parametrize(
    ("status", "kind"),
    [
        (401, AccessDenied),
        (403, AccessDenied),
        (404, ObjectMissing),
        (409, ChangedMeanwhile),
        (422, ApiRefused),
        (429, ApiRefused),
    ],
)
async def test_a_refusal_says_what_kind_it_is_and_why(
    cluster: FakeCluster, port: int, tmp_path: Path, status: int, kind: type[ApiRefused]
) -> None:
    cluster.refuse = lambda _verb, _path: (status, {"kind": "Status", "message": "because"})
    with pytest.raises(ApiRefused, match="because") as found:
        await KubernetesApi("127.0.0.1", port, account=tmp_path).get(LIST, Objects)
    assert type(found.value) is kind
    assert found.value.status == status


async def test_a_server_that_another_authority_vouches_for_gets_no_token(
    cluster: FakeCluster, port: int, tmp_path: Path
) -> None:
    other = tmp_path / "other"
    other.mkdir()
    with served(FakeCluster(), other):
        pass
    with pytest.raises(ApiUnreachable, match="certificate"):
        await KubernetesApi("127.0.0.1", port, account=other).get(LIST, Objects)
    assert cluster.asked == []


@pytest.mark.parametrize("verb", ["GET", "PATCH"])
async def test_an_answer_that_does_not_come_leaves_the_outcome_of_a_change_unknown(
    cluster: FakeCluster, port: int, tmp_path: Path, verb: str
) -> None:
    release = threading.Event()
    cluster.before_answer = lambda _verb, _path: (release.wait(30), None)[1]
    api = KubernetesApi("127.0.0.1", port, account=tmp_path, timeout_s=1.0)
    change = {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 5}}
    asked = api.get(SCALE, Object) if verb == "GET" else api.patch(SCALE, change)
    try:
        with pytest.raises(KubernetesError) as found:
            await asked
    finally:
        release.set()
    assert type(found.value) is (ApiUnreachable if verb == "GET" else OutcomeUnknown)
    assert cluster.replicas == {"d": 2 if verb == "GET" else 5}, "it was made, and nobody was told"


async def test_where_nothing_listens_nothing_was_changed(port: int, tmp_path: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        api = KubernetesApi("127.0.0.1", free.getsockname()[1], account=tmp_path)
        with pytest.raises(ApiUnreachable):
            await api.patch(SCALE, {})


@pytest.mark.parametrize("raw", [b"<html>", b"[1]", b"\xff"])
async def test_an_answer_that_is_no_object_is_an_error(cluster: FakeCluster, port: int, tmp_path: Path, raw: bytes) -> None:
    cluster.raw = raw
    with pytest.raises(AnswerUnreadable):
        await KubernetesApi("127.0.0.1", port, account=tmp_path).get(LIST, Objects)


def test_outside_of_a_cluster_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(ApiUnreachable, match="KUBERNETES_SERVICE_HOST"):
        KubernetesApi.of_this_pod({})
    with pytest.raises(ApiUnreachable, match="service account"):
        KubernetesApi.of_this_pod({"KUBERNETES_SERVICE_HOST": "10.0.0.1"}, tmp_path / "none")


DEPLOYMENTS = "/apis/apps/v1/namespaces/n/deployments?labelSelector=plan.headrace/role%3Ddecode"
GROUPS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/n/leaderworkersets?labelSelector=plan.headrace/role%3Ddecode"


T = TypeVar("T")


class Told:
    """An API with a fixed answer for each path; what is not there is missing."""

    namespace = "n"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers["answers"]

    async def get(self, path: str, kind: type[T]) -> T:
        if path not in self.answers:
            raise ObjectMissing(path, status=404)
        return msgspec.convert(self.answers[path], kind)


def listed(name: str, **annotations: str) -> dict[str, Any]:
    told = {"plan.headrace/pool": "p", **{f"plan.headrace/{key}": value for key, value in annotations.items()}}
    return {"items": [{"metadata": {"name": name, "annotations": told}}]}


async def test_an_engine_over_several_nodes_is_scaled_by_its_group_and_has_no_victims() -> None:
    api = Told(answers={DEPLOYMENTS: {"items": []}, GROUPS: listed("g", least="1", most="3")})
    found = await find_scaled(api, "p", "decode")  # type: ignore[arg-type]
    assert found.path == "/apis/leaderworkerset.x-k8s.io/v1/namespaces/n/leaderworkersets/g"
    assert (found.least, found.most, found.by_cost) == (1, 3, False)


async def test_a_cluster_without_groups_has_deployments() -> None:
    found = await find_scaled(Told(answers={DEPLOYMENTS: listed("d")}), "p", "decode")  # type: ignore[arg-type]
    assert found.path == "/apis/apps/v1/namespaces/n/deployments/d"
    assert found.by_cost


async def test_a_bound_that_is_no_number_is_refused() -> None:
    with pytest.raises(NotScalable, match=r"plan\.headrace/most='many'"):
        await find_scaled(Told(answers={DEPLOYMENTS: listed("d", most="many")}), "p", "decode")  # type: ignore[arg-type]


async def test_a_scale_without_a_selector_is_unreadable_and_one_without_a_number_is_none() -> None:
    api = Told(answers={DEPLOYMENTS: listed("d")})
    found = await find_scaled(api, "p", "decode")  # type: ignore[arg-type]
    api.answers[f"{found.path}/scale"] = {"metadata": {"name": "d"}, "spec": {}, "status": {}}
    with pytest.raises(AnswerUnreadable, match="scale names no selector"):
        await read_scale(api, found)  # type: ignore[arg-type]
    api.answers[f"{found.path}/scale"] = {"metadata": {"name": "d"}, "spec": {}, "status": {"selector": "a=b,c in (d)"}}
    pods = [
        {"metadata": {"name": "a"}, "status": {"phase": "Running"}},
        {"metadata": {"name": "b", "deletionTimestamp": "2026-01-01T00:00:00Z"}},
        {"metadata": {"name": "c"}, "status": {"phase": "Failed"}},
        {"metadata": {"name": "e"}, "status": {"phase": "Running"}},
    ]
    api.answers["/api/v1/namespaces/n/pods?labelSelector=a%3Db%2Cc%20in%20%28d%29"] = {"items": pods}
    scale, read = await read_scale(api, found)  # type: ignore[arg-type]
    assert scale.spec.replicas == 0
    assert [one.name for one in staying(read, {"a", "b", "c"})] == ["a"]


POOL = "m-1234.h100"


def plan(*, starts: int = 0, starting: int = 0, role: str = "decode") -> Plan:
    return Plan(
        at=0.0,
        model="m",
        pool=POOL,
        reason="forecast",
        desired={role: 0},
        supply={role: 0},
        actions=(Action(kind="start", role=role),) * starts,
        starting={role: starting},
    )


class Site:
    """A cluster with one Deployment, a scaler, and the workers that have joined."""

    def __init__(self, folder: Path, port: int, cluster: FakeCluster) -> None:
        self.cluster = cluster
        self.joined = ["d-0", "d-1", "d-2"]
        self.scaler = KubernetesScaler(KubernetesApi("127.0.0.1", port, account=folder, timeout_s=5.0), self.members)

    async def members(self) -> Sequence[WorkerMember]:
        return [WorkerMember(worker=f"w-{host}", pool="m-1234", model="m", host=host) for host in self.joined]

    @property
    def replicas(self) -> int:
        return self.cluster.replicas["d"]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    cluster = FakeCluster()
    cluster.deployment("d", pool=POOL, role="decode", replicas=3, least=1, most=6)
    cluster.deployment("other", pool="another", role="decode", replicas=1)
    cluster.deployment("p", pool=POOL, role="prefill", replicas=1)
    with served(cluster, tmp_path) as port:
        yield Site(tmp_path, port, cluster)


async def test_starts_raise_the_scale_of_the_object_of_this_pool_and_role(site: Site) -> None:
    assert await site.scaler.start(plan(starts=2), "decode") == "d"
    assert site.cluster.replicas == {"d": 5, "other": 1, "p": 1}
    (change,) = [one for one in site.cluster.asked if one[0] == "PATCH"]
    assert change[1] == f"/apis/apps/v1/namespaces/{NAMESPACE}/deployments/d/scale"
    assert change[2] == {"metadata": {"resourceVersion": "7"}, "spec": {"replicas": 5}}


async def test_the_starts_of_a_plan_are_asked_for_once_however_often_it_is_told(site: Site) -> None:
    for _ in range(3):
        await site.scaler.start(plan(starts=2), "decode")
    assert site.replicas == 5


async def test_a_start_whose_pod_waits_for_a_machine_is_not_asked_for_again(site: Site) -> None:
    site.cluster.replicas["d"] = 5
    site.cluster.pod("d-3", of="d", phase="Pending")
    await site.scaler.start(plan(starts=2, starting=0), "decode")  # the planner has given the two up as lost
    assert site.replicas == 5
    await site.scaler.start(plan(starts=1, starting=2), "decode")
    assert site.replicas == 6


async def test_what_the_object_may_have_at_most_is_kept(site: Site) -> None:
    await site.scaler.start(plan(starts=9), "decode")
    assert site.replicas == 6
    with pytest.raises(NotScalable, match="may have 6"):
        await site.scaler.start(plan(starts=9), "decode")


async def test_victims_are_marked_before_the_scale_goes_down(site: Site) -> None:
    await site.scaler.leave(plan(), "decode", ["w-d-1"])
    assert site.cluster.changes() == [("PATCH", "pods/d-1"), ("PATCH", "deployments/d/scale")]
    assert site.cluster.costs() == {"d-1": "-1000"}
    assert site.replicas == 2


async def test_a_scale_down_whose_answer_was_lost_is_not_made_twice(site: Site) -> None:
    def lose(verb: str, path: str) -> None:
        if verb == "PATCH" and path.endswith("/scale"):
            raise ConnectionResetError

    site.cluster.before_answer = lose
    with pytest.raises(OutcomeUnknown):
        await site.scaler.leave(plan(), "decode", ["w-d-1"])
    assert site.replicas == 2
    site.cluster.before_answer = lambda _verb, _path: None
    await site.scaler.leave(plan(), "decode", ["w-d-1"])  # its lease still says that it serves
    await site.scaler.leave(plan(), "decode", ["w-d-2"])
    assert site.replicas == 2


async def test_a_mark_of_a_change_that_was_not_made_is_taken_back(site: Site) -> None:
    site.cluster.refuse = lambda verb, path: (403, {"message": "no"}) if verb == "PATCH" and path.endswith("/scale") else None
    with pytest.raises(AccessDenied):
        await site.scaler.leave(plan(), "decode", ["w-d-1"])
    assert site.cluster.costs() == {}
    assert site.replicas == 3


async def test_an_old_mark_does_not_choose_another_victim(site: Site) -> None:
    site.cluster.pods["d-0"]["metadata"]["annotations"]["controller.kubernetes.io/pod-deletion-cost"] = "-1000"
    await site.scaler.leave(plan(), "decode", ["w-d-2"])
    assert site.cluster.costs() == {"d-2": "-1000"}


async def test_pods_that_end_already_are_counted_as_gone(site: Site) -> None:
    site.cluster.replicas["d"] = 2
    site.cluster.pod("d-0", of="d", ending=True)
    await site.scaler.leave(plan(), "decode", ["w-d-0"])
    assert site.replicas == 2
    await site.scaler.leave(plan(), "decode", ["w-d-1"])
    assert site.replicas == 1


async def test_pods_that_wait_for_a_machine_go_with_a_scale_down(site: Site) -> None:
    site.cluster.replicas["d"] = 5
    site.cluster.pod("d-3", of="d", phase="Pending")
    site.cluster.pod("d-4", of="d", phase="Pending")
    await site.scaler.leave(plan(), "decode", ["w-d-1"])
    assert site.replicas == 2


async def test_an_object_that_was_changed_meanwhile_is_read_again_once(site: Site) -> None:
    changes = iter([1])

    def change() -> None:
        if next(changes, None):
            site.cluster.replicas["d"], site.cluster.version = 4, 99  # an operator was quicker

    site.cluster.before_change = change
    await site.scaler.start(plan(starts=2), "decode")
    assert site.replicas == 5, "the operator's one is coming, so one more is enough"

    def always() -> None:
        site.cluster.version += 1

    site.cluster.before_change = always
    with pytest.raises(ChangedMeanwhile):
        await site.scaler.start(plan(starts=3), "decode")
    assert site.replicas == 5


async def test_a_worker_that_is_no_pod_of_the_object_is_refused_and_nothing_changes(site: Site) -> None:
    site.joined.append("node-7")  # with the host's network a pod has the name of its machine
    with pytest.raises(NotScalable, match="node-7"):
        await site.scaler.leave(plan(), "decode", ["w-node-7"])
    with pytest.raises(NotScalable, match="unknown"):
        await site.scaler.leave(plan(), "decode", ["w-gone"])
    assert site.cluster.changes() == []


async def test_fewer_than_the_object_may_have_are_refused(site: Site) -> None:
    with pytest.raises(NotScalable, match="fewer than 1"):
        await site.scaler.leave(plan(), "decode", ["w-d-0", "w-d-1", "w-d-2"])
    assert site.replicas == 3


@pytest.mark.parametrize("pool", ["m-1234", "m-1234.a100"])
async def test_a_pool_without_an_object_and_one_with_two_are_refused(site: Site, pool: str) -> None:
    site.cluster.annotations["d"]["plan.headrace/pool"] = pool
    with pytest.raises(NotScalable, match="no object"):
        await site.scaler.start(plan(starts=1), "decode")
    site.cluster.annotations["d"]["plan.headrace/pool"] = POOL
    site.cluster.annotations["other"]["plan.headrace/pool"] = POOL
    with pytest.raises(NotScalable, match="several objects"):
        await site.scaler.start(plan(starts=1), "decode")
    assert site.cluster.changes() == []


async def test_an_object_that_is_gone_and_one_that_may_not_be_read_are_told_apart(site: Site) -> None:
    site.cluster.refuse = lambda _verb, path: (404, {"message": "gone"}) if path.endswith("/scale") else None
    with pytest.raises(ObjectMissing):
        await site.scaler.start(plan(starts=1), "decode")
    site.cluster.refuse = lambda _verb, _path: (403, {"message": "forbidden: cannot list"})
    with pytest.raises(AccessDenied, match="cannot list"):
        await site.scaler.start(plan(starts=1), "decode")
