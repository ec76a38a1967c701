"""Plans carried out on a fake of the Kubernetes API over real TLS. There is no cluster here."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from headrace.broker.messages import WorkerMember
from headrace.planner.actions import Action
from headrace.planner.kubernetes.api import KubernetesApi
from headrace.planner.kubernetes.errors import AccessDenied, ChangedMeanwhile, NotScalable, ObjectMissing, OutcomeUnknown
from headrace.planner.kubernetes.scaler import KubernetesScaler
from headrace.planner.plan import Plan
from tests.support.kubernetes_api import NAMESPACE, FakeCluster, served

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
    assert await site.scaler.leave(plan(), "decode", ["w-d-1"]) == ["w-d-1"]
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
