"""What Kubernetes says of an object that is scaled, read without a server."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.planner.kubernetes.errors import AnswerUnreadable, NotScalable, ObjectMissing
from headrace.planner.kubernetes.scaled_objects import find_scaled, read_scale, staying

DEPLOYMENTS = "/apis/apps/v1/namespaces/n/deployments?labelSelector=plan.headrace/role%3Ddecode"
GROUPS = "/apis/leaderworkerset.x-k8s.io/v1/namespaces/n/leaderworkersets?labelSelector=plan.headrace/role%3Ddecode"


class Told:
    """An API with a fixed answer for each path; what is not there is missing."""

    namespace = "n"

    def __init__(self, **answers: Any) -> None:
        self.answers = answers["answers"]

    async def get(self, path: str) -> dict[str, Any]:
        if path not in self.answers:
            raise ObjectMissing(path, status=404)
        found: dict[str, Any] = self.answers[path]
        return found


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
    with pytest.raises(AnswerUnreadable, match="Scale"):
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
    assert [one.metadata.name for one in staying(read, {"a", "b", "c"})] == ["a"]
