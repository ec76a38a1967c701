"""What the chart makes of pools that scale, and of engines over several nodes."""

from __future__ import annotations

import pytest

from deploy.kubernetes.write import rendered
from headrace.jetstream.subjects import pool_id
from tests.support.kubernetes_objects import Object, containers, needs_tools

pytestmark = needs_tools


def test_a_pool_that_scales_to_more_than_it_may_is_refused() -> None:
    from helm_python import HelmError

    scaling = {"enabled": True, "least": 5, "most": 4}
    with pytest.raises(HelmError, match="least"):
        rendered({"pools": {"p": {"roles": {"aggregated": {"scaling": scaling}}}}})


@pytest.mark.parametrize(
    ("model", "fleet"), [("Qwen/Qwen3-0.6B", ""), ("a.b_c/D", "h100"), ("x" * 60, "")], ids=["plain", "of a fleet", "long"]
)
def test_keda_reads_what_the_planner_wants_for_exactly_this_pool(model: str, fleet: str) -> None:
    role = {"scaling": {"enabled": True}, "fleet": fleet}
    found = rendered({"planner": {"enabled": True}, "pools": {"p": {"model": model, "roles": {"decode": role}}}})
    (scaled,) = (one for one in found if one["kind"] == "ScaledObject")
    (trigger,) = scaled["spec"]["triggers"]
    (service,) = (one for one in found if one["kind"] == "Service" and one["metadata"]["name"] == "headrace-planner")
    pool = f"{pool_id(model)}.{fleet}" if fleet else pool_id(model)
    address = f"http://headrace-planner.headrace.svc:{service['spec']['ports'][0]['port']}"
    assert trigger["metadata"]["url"] == f"{address}/desired/{pool}/decode"
    assert trigger["metadata"]["valueLocation"] == "desired"
    name = scaled["spec"]["scaleTargetRef"]["name"]
    (target,) = (one for one in found if one["metadata"]["name"] == name and one["kind"] == "Deployment")
    assert "replicas" not in target["spec"], "or each upgrade would undo what was scaled"


@pytest.mark.parametrize(("nodes", "fleet"), [(1, ""), (1, "h100"), (2, "")])
def test_a_planner_that_scales_itself_finds_its_object_and_has_the_rights_for_it_alone(nodes: int, fleet: str) -> None:
    role = {"scaling": {"enabled": True, "by": "planner", "least": 2, "most": 9}, "fleet": fleet, "nodes": nodes}
    pool = {"engine": "sglang-cuda", "model": "org/m", "roles": {"decode": role}}
    found = rendered({"planner": {"enabled": True}, "pools": {"p": pool}})
    kind = "LeaderWorkerSet" if nodes > 1 else "Deployment"
    (scaled,) = (one for one in found if one["kind"] == kind and one["metadata"]["name"].endswith("-p-decode"))
    assert scaled["metadata"]["labels"]["plan.headrace/role"] == "decode"
    wanted = f"{pool_id('org/m')}.{fleet}" if fleet else pool_id("org/m")
    assert scaled["metadata"]["annotations"] == {
        "plan.headrace/pool": wanted,
        "plan.headrace/least": "2",
        "plan.headrace/most": "9",
    }
    assert "replicas" not in scaled["spec"]
    assert not any(one["kind"] == "ScaledObject" for one in found), "two would pull at one number"
    (planner,) = (one for one, _, _ in containers(found) if one["args"][0] == "planner")
    assert planner["args"][-3:] == ["--mode", "act", "--kubernetes"]
    (rights,) = (one for one in found if one["kind"] == "Role")
    (bound,) = (one for one in found if one["kind"] == "RoleBinding")
    assert bound["roleRef"]["name"] == rights["metadata"]["name"]
    assert bound["subjects"] == [{"kind": "ServiceAccount", "name": "headrace-planner", "namespace": "headrace"}]
    kinds = "leaderworkersets" if nodes > 1 else "deployments"
    allowed = {
        resource: (rule["verbs"], rule.get("resourceNames")) for rule in rights["rules"] for resource in rule["resources"]
    }
    assert allowed == {
        "deployments": (["list"], None),
        "leaderworkersets": (["list"], None),
        f"{kinds}/scale": (["get", "patch"], [scaled["metadata"]["name"]]),
        "pods": (["list", "patch"], None),
    }


def test_without_a_planner_that_scales_nobody_has_rights() -> None:
    found = rendered({"planner": {"enabled": True}, "pools": {"p": {"roles": {"decode": {"scaling": {"enabled": True}}}}}})
    assert not any(one["kind"] in ("Role", "RoleBinding") for one in found)
    assert {template["spec"]["automountServiceAccountToken"] for _, template, _ in containers(found)} == {False}


def test_scaling_by_a_planner_that_does_not_run_is_refused() -> None:
    from helm_python import HelmError

    scaling = {"enabled": True, "by": "planner"}
    with pytest.raises(HelmError, match=r"planner\.enabled"):
        rendered({"pools": {"p": {"roles": {"decode": {"scaling": scaling}}}}})


def test_the_parts_of_an_engine_over_several_nodes_find_each_other_and_end_together(everything: list[Object]) -> None:
    (group,) = (one for one in everything if one["kind"] == "LeaderWorkerSet")
    parts = group["spec"]["leaderWorkerTemplate"]
    assert parts["restartPolicy"] == "RecreateGroupOnPodRestart"
    for template in (parts["leaderTemplate"], parts["workerTemplate"]):
        arguments = template["spec"]["containers"][0]["args"]
        assert {"nnodes=2", "node_rank=$(LWS_WORKER_INDEX)", "dist_init_addr=$(LWS_LEADER_ADDRESS):20000"} <= set(arguments)
    assert "readinessProbe" not in parts["workerTemplate"]["spec"]["containers"][0], "a follower takes no requests"


def test_the_parts_of_a_vllm_find_each_other_by_its_own_settings() -> None:
    pool = {"engine": "vllm-cuda", "model": "org/large", "roles": {"aggregated": {"nodes": 2}}}
    (group,) = (one for one in rendered({"pools": {"p": pool}}) if one["kind"] == "LeaderWorkerSet")
    for template in (group["spec"]["leaderWorkerTemplate"][part] for part in ("leaderTemplate", "workerTemplate")):
        arguments = template["spec"]["containers"][0]["args"]
        wanted = {"nnodes=2", "node_rank=$(LWS_WORKER_INDEX)", "master_addr=$(LWS_LEADER_ADDRESS)", "master_port=20000"}
        assert wanted <= set(arguments)
        assert not any(argument.startswith("dist_init_addr") for argument in arguments)
