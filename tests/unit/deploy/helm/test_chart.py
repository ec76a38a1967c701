"""The chart: every value reaches an object, every object is valid, and what it promises of drains, rights and secrets holds."""

from __future__ import annotations

import json
import os
import re
import shutil
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, Phase, given, settings

from deploy.kubernetes.write import CHART, rendered, texts
from headrace.doctor import NATS_SERVER
from tests.support.chart_values import another, any_value, at, places, with_value
from tests.support.command_lines import drain_s, is_known, read
from tests.support.kubernetes_objects import VERSIONS, Object, containers, faults, needs_tools, pod_templates, selects
from tests.support.whole_chart import EVERYTHING

pytestmark = needs_tools

SCHEMA: Any = json.loads((CHART / "values.schema.json").read_text())
DEFAULTS: Any = yaml.safe_load((CHART / "values.yaml").read_text())
NAMES = {("pools",): ("own",)}
# all roles are made by one template: of prefill and encode the number of workers is enough
SAME = [("roles", "prefill"), ("roles", "encode")]
PLACES = [
    (place, schema)
    for place, schema in places(SCHEMA, SCHEMA, NAMES)
    if place[0] not in ("nats", "global")
    and (place[-3:-1] not in SAME or place[-1] == "replicas")
    and not any(place[at : at + 2] in SAME and len(place) > at + 3 for at in range(len(place)))
]
PARTS = ("frontend", "router", "worker", "planner", "console", "steward")


@cache
def texts_of(values: str) -> list[str]:
    return texts(json.loads(values))


def needed(place: tuple[str, ...]) -> dict[str, Any]:
    """Everything, and in addition what gives the value at this place an effect."""
    values = EVERYTHING
    if place[:2] == ("pools", "own") and place[-1] in ("context", "key"):
        return values
    if place == ("poolDefaults", "login", "context"):
        return with_value(values, ("poolDefaults", "login", "secret"), "login")
    if place == ("poolDefaults", "hubTokenSecret", "key"):
        return with_value(values, ("poolDefaults", "hubTokenSecret", "name"), "hub")
    if place == ("planner", "enabled"):  # a role that the planner scales cannot be without it
        return with_value(values, ("pools", "planned", "roles", "decode", "scaling", "by"), "keda")
    if place[-2:] == ("scaling", "by"):
        return with_value(with_value(values, (*place[:-1], "enabled"), True), place, "planner")
    if place[-2:-1] == ("scaling",):
        return with_value(values, (*place[:-1], "enabled"), True)
    return values


@pytest.mark.parametrize(("place", "schema"), PLACES, ids=[".".join(place) for place, _ in PLACES])
def test_a_value_reaches_an_object(place: tuple[str, ...], schema: Any) -> None:
    base = needed(place)
    now = at(base, place) if at(base, place) is not None else at(DEFAULTS, place)
    value = another(schema, SCHEMA, now)
    before, after = texts_of(json.dumps(base)), texts(with_value(base, place, value))
    assert before != after, f"{'.'.join(place)} = {value!r} changes nothing"
    if isinstance(value, str | int) and not isinstance(value, bool):
        assert str(value) in "\n".join(after)


def test_a_value_that_no_template_reads_is_found() -> None:
    from helm_python import HelmError

    with pytest.raises(HelmError):
        rendered({"frontend": {"replicaCount": 3}})


@pytest.mark.parametrize("version", VERSIONS)
def test_every_object_is_valid(everything: list[Object], version: str) -> None:
    assert [fault for thing in everything for fault in faults(thing, version)] == []
    assert {thing["kind"] for thing in everything} >= {"LeaderWorkerSet", "ScaledObject", "PodMonitor", "NetworkPolicy"}


OURS = (
    "HEADRACE_NATS_URL",
    "HEADRACE_PREFIX",
    "HEADRACE_NAMESPACE",
    "HEADRACE_LOG_LEVEL",
    "HEADRACE_WORKER_LABELS",
    "HEADRACE_WORKER_ZONE",
)
LEFT_OUT = frozenset(
    (
        "affinity",
        "tolerations",
        "clientsFrom",
        "metricsFrom",
        "natsFrom",
        "egress",
        "global",
        "nats",
        "engineArgs",
        "args",
        "scaling",
    )
)


@settings(max_examples=30, deadline=None, phases=(Phase.generate,), suppress_health_check=list(HealthCheck), derandomize=True)
@given(values=any_value(SCHEMA, SCHEMA, LEFT_OUT))
def test_values_that_the_schema_allows_make_valid_objects_and_command_lines(values: dict[str, Any]) -> None:
    found = rendered(values)
    assert [fault for thing in found for version in (VERSIONS[0], VERSIONS[-1]) for fault in faults(thing, version)] == []
    for container, template, _ in containers(found):
        words, environ = command(container)
        if is_known(words[0]):
            given = {name: value for name, value in environ.items() if name in OURS}
            assert template["spec"]["terminationGracePeriodSeconds"] >= drain_s(read(words, given), words[0]) + 10


def command(container: Object) -> tuple[list[str], dict[str, str]]:
    """Return the words and the plain variables of a container, as the kubelet expands them."""
    words = [word.replace("$(LWS_WORKER_INDEX)", "0").replace("$(LWS_LEADER_ADDRESS)", "leader") for word in container["args"]]
    environ = {variable["name"]: variable["value"] for variable in container["env"] if "value" in variable}
    paths = {"HEADRACE_NATS_CONTEXT", "HF_HOME"}
    return words, {name: value for name, value in environ.items() if name.startswith("HEADRACE_") and name not in paths}


def test_each_command_line_is_understood_and_no_pod_ends_before_its_drain(everything: list[Object]) -> None:
    seen = set()
    for container, template, _ in containers(everything):
        words, environ = command(container)
        seen.add(words[0])
        if not is_known(words[0]):
            continue
        read_settings = read(words, environ)
        assert template["spec"]["terminationGracePeriodSeconds"] >= drain_s(read_settings, words[0]) + 10
        assert container.get("command") is None, "the part is the first process, so that SIGTERM drains it"
        stop = container.get("lifecycle", {}).get("preStop")
        assert (stop is not None) == (words[0] == "frontend"), (
            "a drain by a hook would make SIGTERM the second one, which kills"
        )
    assert seen == set(PARTS)


def test_frontends_finish_the_longest_request() -> None:
    (frontend,) = (
        one for one in rendered(EVERYTHING) if one["kind"] == "Deployment" and one["metadata"]["name"].endswith("-frontend")
    )
    words, environ = command(frontend["spec"]["template"]["spec"]["containers"][0])
    found = read(words, environ)
    assert found["frontend.drain_grace_s"] >= found["frontend.max_deadline_s"] >= found["frontend.deadline_s"]


def test_probes_ask_the_routes_that_processes_have(everything: list[Object]) -> None:
    for container, _, thing in containers(everything):
        words = container["args"]
        ports = {port["name"] for port in container.get("ports", ())}
        ready = "/ready?of=frontend" if words[0] == "frontend" else "/ready"
        for name, path in (("startupProbe", "/live"), ("livenessProbe", "/live"), ("readinessProbe", ready)):
            probe = container.get(name)
            if words[0] in ("frontend", "router", "planner") or (words[0] == "worker" and thing["kind"] == "Deployment"):
                assert probe is not None, (thing["metadata"]["name"], name)
            if probe is not None and "httpGet" in probe:
                assert probe["httpGet"]["path"] == path
                assert probe["httpGet"]["port"] in ports


def test_a_worker_may_take_as_long_to_start_as_its_pool_says() -> None:
    found = rendered({"pools": {"a": {"roles": {"aggregated": {"startSeconds": 3600}}}}})
    (worker,) = (one for one, _, _ in containers(found) if one["args"][0] == "worker")
    probe = worker["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= 3600


def test_pods_have_no_rights_and_read_only_roots(everything: list[Object]) -> None:
    for container, template, _ in containers(everything):
        pod = template["spec"]
        assert pod["securityContext"]["runAsNonRoot"] is True
        assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        asks_kubernetes = "--kubernetes" in container["args"]
        assert pod["automountServiceAccountToken"] is asks_kubernetes
        assert (pod["serviceAccountName"] == "headrace-planner") is asks_kubernetes, "its rights are nobody else's"
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }
        written = {mount["mountPath"] for mount in container["volumeMounts"] if not mount.get("readOnly")}
        assert {"/tmp", "/data"} <= written  # noqa: S108  # a path in a container
        assert {mount["name"] for mount in container["volumeMounts"]} == {volume["name"] for volume in pod["volumes"]}


def test_secrets_are_references_and_no_login_is_given_to_another_part(everything: list[Object]) -> None:
    assert not any(thing["kind"] == "Secret" for thing in everything)
    for container, _, _ in containers(everything):
        for variable in container["env"]:
            if re.search(r"KEY|TOKEN|PASSWORD", variable["name"]):
                assert "secretKeyRef" in variable["valueFrom"]
    logins = {part: {"secret": f"login-{part}"} for part in PARTS if part != "worker"}
    found = rendered(
        {
            **{
                part: {"login": login, **({"enabled": True} if part in ("planner", "console") else {})}
                for part, login in logins.items()
            }
        }
    )
    for container, template, _ in containers(found):
        names = [volume["secret"]["secretName"] for volume in template["spec"]["volumes"] if "secret" in volume]
        assert names == [f"login-{container['args'][0]}"]


def test_selectors_budgets_and_policies_select_the_pods_they_are_for(everything: list[Object]) -> None:
    pods = [template["metadata"]["labels"] for thing in everything for template in pod_templates(thing)]
    for thing in everything:
        if thing["kind"] == "Deployment":
            labels = thing["spec"]["template"]["metadata"]["labels"]
            own = [pod for pod in pods if selects(thing["spec"]["selector"]["matchLabels"], pod)]
            assert own == [labels], "each Deployment has its own pods and no others"
        elif thing["kind"] == "PodDisruptionBudget":
            assert any(selects(thing["spec"]["selector"]["matchLabels"], pod) for pod in pods)
        elif thing["kind"] == "Service":
            assert any(selects(thing["spec"]["selector"], pod) for pod in pods)
    (everyone,) = (one for one in everything if one["kind"] == "NetworkPolicy" and one["metadata"]["name"] == "headrace")
    assert all(selects(everyone["spec"]["podSelector"]["matchLabels"], pod) for pod in pods)
    assert len({json.dumps([thing["kind"], thing["metadata"]["name"]]) for thing in everything}) == len(everything)


def test_a_worker_knows_its_pool_and_version_and_zone_by_the_labels_of_its_pod(everything: list[Object]) -> None:
    """Downward API. The zone's label is copied from the node by Kubernetes, the others are in the template."""
    seen = 0
    for container, template, _ in containers(everything):
        env = {one["name"]: one for one in container.get("env", ())}
        if "HEADRACE_WORKER_LABELS" not in env:
            continue
        seen += 1
        assert env["HEADRACE_WORKER_LABELS"]["value"].startswith("pool=$(POD_POOL),version=$(POD_VERSION)")
        names = list(env)
        assert names.index("HEADRACE_WORKER_LABELS") > max(names.index("POD_POOL"), names.index("POD_VERSION")), (
            "else not filled in"
        )
        for name, label in (("POD_POOL", "headrace/pool"), ("POD_VERSION", "app.kubernetes.io/version")):
            assert env[name]["valueFrom"]["fieldRef"]["fieldPath"] == f"metadata.labels['{label}']"
            assert template["metadata"]["labels"][label]
        zone = env["HEADRACE_WORKER_ZONE"]
        assert zone.get("value") or "topology.kubernetes.io/zone" in zone["valueFrom"]["fieldRef"]["fieldPath"]
    assert seen >= 2


def test_the_chart_has_no_resource_definitions_of_others() -> None:
    assert not (CHART / "crds").exists()
    from helm_python import Chart

    with Chart.load(CHART) as chart:
        assert chart.crds == []


def test_the_broker_keeps_three_copies_and_streams_in_memory() -> None:
    nats = DEFAULTS["nats"]["config"]
    assert nats["cluster"] == {"enabled": True, "replicas": 3}
    assert DEFAULTS["broker"]["replicas"] == nats["cluster"]["replicas"]
    assert nats["jetstream"]["memoryStore"]["enabled"] is True
    assert nats["jetstream"]["merge"]["sync_interval"] == "always"
    version = DEFAULTS["nats"]["container"]["image"]["tag"].partition("-")[0]
    assert tuple(map(int, version.split("."))) >= NATS_SERVER


def nats_values(folder: Path, values: Object) -> list[Object]:
    """The values that a chart named `nats` below ours gets, which tells them in an object; none where it is left out."""
    from helm_python import Chart

    ours = Path(shutil.copytree(CHART, folder / "headrace"))
    (ours / "charts" / "nats" / "templates").mkdir(parents=True)
    about = {"apiVersion": "v2", "name": "nats", "version": "2.14.2"}
    (ours / "charts" / "nats" / "Chart.yaml").write_text(json.dumps(about))
    told = '{"apiVersion": "v1", "kind": "ConfigMap", "data": {"values": {{ toJson .Values | quote }}}}'
    (ours / "charts" / "nats" / "templates" / "told.yaml").write_text(told)
    with Chart.load(ours) as chart:
        texts = chart.render(values, name="r", namespace="n")
    objects = [one for path, text in texts.items() if "/charts/nats/" in path for one in yaml.safe_load_all(text) if one]
    return [json.loads(one["data"]["values"]) for one in objects]


def leaves(values: Any, at: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(values, dict) or not values:
        return [at]
    return [leaf for name, below in values.items() for leaf in leaves(below, (*at, name))]


def test_every_value_for_the_chart_of_nats_reaches_it(tmp_path: Path) -> None:
    (told,) = nats_values(tmp_path / "plain", {})
    places_of_nats = leaves(DEFAULTS["nats"])
    assert ("config", "merge", "write_deadline") in places_of_nats
    for place in places_of_nats:
        assert at(told, place) == at(DEFAULTS["nats"], place), ".".join(place)
    changed = with_value({"nats": DEFAULTS["nats"]}, ("nats", "config", "merge", "write_deadline"), "2s")
    (other,) = nats_values(tmp_path / "changed", changed)
    assert at(other, ("config", "merge", "write_deadline")) == "2s"
    assert nats_values(tmp_path / "without", {"nats": {"enabled": False}}) == []


@pytest.mark.skipif("HEADRACE_NATS_CHART" not in os.environ, reason="HEADRACE_NATS_CHART names no folder with NATS' chart")
def test_the_chart_of_nats_makes_of_our_values_what_they_say(tmp_path: Path) -> None:
    from helm_python import Chart

    ours = Path(shutil.copytree(CHART, tmp_path / "headrace"))
    shutil.copytree(os.environ["HEADRACE_NATS_CHART"], ours / "charts" / "nats")
    with Chart.load(ours) as chart:
        texts = chart.render({}, name="r", namespace="n")
    found = [one for path, text in texts.items() if "/charts/nats/" in path for one in yaml.safe_load_all(text) if one]
    (servers,) = (one for one in found if one["kind"] == "StatefulSet")
    config = next(one for one in found if one["kind"] == "ConfigMap")["data"]["nats.conf"]
    assert '"max_memory_store": 2Gi' in config
    assert '"max_connections": 65536' in config
    assert '"write_deadline": "1s"' in config
    assert servers["spec"]["replicas"] == 3
    spread = servers["spec"]["template"]["spec"]["topologySpreadConstraints"]
    assert {one["topologyKey"]: one["whenUnsatisfiable"] for one in spread} == {
        "kubernetes.io/hostname": "DoNotSchedule",
        "topology.kubernetes.io/zone": "ScheduleAnyway",
    }
    labels = servers["spec"]["template"]["metadata"]["labels"]
    policy = next(one for one in rendered({}, name="r", namespace="n") if one["metadata"]["name"] == "r-nats")
    assert selects(policy["spec"]["podSelector"]["matchLabels"], labels)
    assert [fault for thing in found for fault in faults(thing, "1.33")] == []
