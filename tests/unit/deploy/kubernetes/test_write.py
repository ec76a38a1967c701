"""The plain manifests are those of the chart, and every object is one that Kubernetes 1.25 to 1.37 takes as it stands."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.kubernetes.write import FOLDER, files, rendered
from tests.support.kubernetes_objects import CUSTOM, VERSIONS, faults, needs_tools, pod_templates, selects

pytestmark = needs_tools

MANIFESTS = sorted(path for path in FOLDER.glob("*.yaml") if not path.name.endswith(".values.yaml"))
NATS = FOLDER / "nats.yaml"


def with_keda() -> list[dict[str, Any]]:
    values = yaml.safe_load((FOLDER / "disaggregated.values.yaml").read_text()) | {"podMonitor": {"enabled": True}}
    for role in values["pools"]["main"]["roles"].values():
        role["scaling"]["by"] = "keda"
    return rendered(values)


def documents(path: Path) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all(path.read_text()) if document]


def test_the_manifests_are_what_the_chart_makes_of_their_values() -> None:
    for path, text in files().items():
        assert path.read_text() == text, f"{path.name}: python -m deploy.kubernetes.write"
    assert {path.stem for path in MANIFESTS} == {"aggregated", "disaggregated", "multi-node", "nats"}


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid_and_has_no_field_that_is_unknown(version: str) -> None:
    for path in MANIFESTS:
        assert [fault for thing in documents(path) for fault in faults(thing, version)] == [], path.name


@pytest.mark.parametrize(
    ("file", "kind", "where"),
    [
        ("aggregated", "Deployment", ("spec", "template", "spec", "containers", 0, "readinesProbe")),
        ("aggregated", "PodDisruptionBudget", ("spec", "maxUnavailble")),
        ("disaggregated", "Role", ("rules", 0, "verb")),
        ("by the chart with KEDA", "ScaledObject", ("spec", "minReplicas")),
        ("by the chart with KEDA", "PodMonitor", ("spec", "podMetricsEndpoints", 0, "intervall")),
        ("multi-node", "LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "sizes")),
        ("multi-node", "LeaderWorkerSet", ("spec", "leaderWorkerTemplate", "workerTemplate", "spec", "node")),
    ],
)
def test_a_misspelt_field_is_found(file: str, kind: str, where: tuple[Any, ...]) -> None:
    found = with_keda() if "KEDA" in file else documents(FOLDER / f"{file}.yaml")
    thing = next(one for one in found if one["kind"] == kind)
    assert faults(thing, "1.30") == []
    place: Any = thing
    for key in where[:-1]:
        place = place[key]
    place[where[-1]] = "1"
    assert any(where[-1] in fault for fault in faults(thing, "1.30"))


def test_the_manifests_need_nothing_that_is_not_in_kubernetes_but_leaderworkersets_for_several_machines() -> None:
    others = {
        (path.stem, thing["kind"])
        for path in MANIFESTS
        for thing in documents(path)
        if (thing["apiVersion"], thing["kind"]) in CUSTOM
    }
    assert others == {("multi-node", "LeaderWorkerSet")}


def test_the_planner_of_the_manifests_may_scale_what_it_is_to_scale() -> None:
    found = documents(FOLDER / "disaggregated.yaml")
    scaled = [thing for thing in found if "plan.headrace/pool" in (thing["metadata"].get("annotations") or {})]
    assert {thing["metadata"]["labels"]["plan.headrace/role"] for thing in scaled} == {"prefill", "decode"}
    (role,) = (thing for thing in found if thing["kind"] == "Role")
    (binding,) = (thing for thing in found if thing["kind"] == "RoleBinding")
    (planner,) = (thing for thing in found if thing["metadata"]["name"] == "headrace-planner" and thing["kind"] == "Deployment")
    assert binding["roleRef"]["name"] == role["metadata"]["name"]
    assert [who["name"] for who in binding["subjects"]] == [planner["spec"]["template"]["spec"]["serviceAccountName"]]
    assert any("deployments/scale" in rule["resources"] and "patch" in rule["verbs"] for rule in role["rules"])
    (template,) = pod_templates(planner)
    words = template["spec"]["containers"][0]["args"]
    assert words[words.index("--mode") + 1] == "act"
    assert "--kubernetes" in words


def test_the_broker_of_the_manifests_is_the_one_that_they_name() -> None:
    found = documents(NATS)
    (service,) = (one for one in found if one["kind"] == "Service" and one["spec"].get("clusterIP") != "None")
    (servers,) = (one for one in found if one["kind"] == "StatefulSet")
    url = f"nats://{service['metadata']['name']}:{service['spec']['ports'][0]['port']}"
    for path in MANIFESTS:
        if path != NATS:
            assert path.read_text().count(url) >= 3
    labels = servers["spec"]["template"]["metadata"]["labels"]
    chosen = [one["spec"]["selector"] for one in found if one["kind"] in ("Service", "PodDisruptionBudget")]
    assert all(selects(selector.get("matchLabels", selector), labels) for selector in chosen)
    (template,) = pod_templates(servers)
    (server,) = template["spec"]["containers"]
    grace, config = template["spec"]["terminationGracePeriodSeconds"], documents(NATS)[0]["data"]["nats-server.conf"]
    assert "lame_duck_duration: 30s" in config
    assert "write_deadline: 1s" in config
    assert "  sync_interval: always" in config.splitlines()
    assert grace >= 30 + 10 + 5
    assert "ldm=/tmp/nats-server.pid" in server["lifecycle"]["preStop"]["exec"]["command"]


def test_nats_server_takes_the_configuration_of_the_manifests(tmp_path: Path) -> None:
    text = documents(NATS)[0]["data"]["nats-server.conf"]
    (tmp_path / "nats-server.conf").write_text(text)
    program = shutil.which("nats-server", path=str(Path(sys.executable).parent))
    assert program is not None
    done = subprocess.run(
        [program, "-t", "-c", str(tmp_path / "nats-server.conf")],
        env={"SERVER_NAME": "headrace-nats-0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
