"""Electors run by default in a cluster that asks for no login, and with their login where others have logins too."""

from __future__ import annotations

import json
import re
from typing import Any

import pytest
import yaml

from headrace.jetstream.logins.elector_login import ELECTOR, PERMISSIONS
from tests.support.deployed_files import NATS_CHART, elector_of, manifests, whole_chart
from tests.support.kubernetes_objects import needs_tools

pytestmark = needs_tools

KINDS = [False, pytest.param(True, marks=pytest.mark.skipif(not NATS_CHART, reason="HEADRACE_NATS_CHART names no folder"))]
OWN_LOGINS: list[dict[str, Any]] = [
    {"merge": {"logins$include": "/etc/logins/accounts.conf"}},
    {"merge": {"$include": "accounts.conf"}},
    {"merge": {"accounts": {"HR": {"users": [{"user": "parts", "password": "<< $PASSWORD >>"}]}}}},
    {"merge": {"authorization": {"token": "<< $TOKEN >>"}}},
    {"merge": {"Authorization": {"token": "<< $TOKEN >>"}}},
    {"merge": {"operator": "eyJ"}},
    {"merge": {"system_account": "SYS"}},
    {"merge": {"logins": {"$tplYamlSpread": "accounts: {}"}}},
    {"patch": [{"op": "add", "path": "/authorization", "value": {"token": "t"}}]},
]
RIGHTS = {"publish": list(PERMISSIONS.publish), "subscribe": list(PERMISSIONS.subscribe)}


def parsed(config: str) -> Any:
    """The configuration of NATS' chart, which is JSON but for raw words."""
    return json.loads(re.sub(r": (\$\w+|\d+\w+)", r': "\1"', config))


@pytest.mark.parametrize("real", KINDS)
def test_by_default_electors_run_with_a_login_that_has_their_rights_and_no_secret(real: bool) -> None:
    objects, config, notes = whole_chart({}, real=real)
    container = elector_of(objects)
    assert container is not None
    assert parsed(config)["accounts"] == {"$SYS": {"users": [{"user": ELECTOR, "permissions": RIGHTS}]}}
    assert "elector" not in parsed(config), "the value is spread"
    words = container["args"]
    assert words[words.index("--nats-user") + 1] == ELECTOR
    assert "No elector runs" not in notes
    (env,) = (one["value"] for one in container["env"] if one["name"] == "HEADRACE_NATS_URL")
    servers = env.split(",")
    assert servers == [f"nats://llm-nats-{number}.llm-nats-headless.here.svc:4222" for number in range(3)]


def test_the_manifests_give_electors_the_same_login_and_the_addresses_of_their_servers() -> None:
    found = manifests("nats.yaml")
    config = next(one for one in found if one["kind"] == "ConfigMap")["data"]["nats-server.conf"]
    (block,) = re.findall(r"(?s)accounts \{.*?\n\}", config)
    quoted = re.findall(r'"([^"]+)"', block)
    assert quoted == [*PERMISSIONS.publish, *PERMISSIONS.subscribe]
    (servers,) = (one for one in found if one["kind"] == "StatefulSet")
    name, domain, count = servers["metadata"]["name"], servers["spec"]["serviceName"], servers["spec"]["replicas"]
    for file in ("aggregated.yaml", "disaggregated.yaml", "multi-node.yaml"):
        container = elector_of(manifests(file))
        assert container is not None
        (env,) = (one["value"] for one in container["env"] if one["name"] == "HEADRACE_NATS_URL")
        assert env.split(",") == [f"nats://{name}-{number}.{domain}:4222" for number in range(count)]
        assert container["args"][container["args"].index("--nats-user") + 1] == ELECTOR


@pytest.mark.parametrize("own", OWN_LOGINS, ids=lambda own: yaml.safe_dump(own, default_flow_style=True, width=999).strip())
def test_servers_with_logins_of_their_own_get_none_from_the_chart(own: dict[str, Any]) -> None:
    """A user without a password beside others could call elections, which only those who may do all else may do there."""
    objects, config, notes = whole_chart({"nats": {"config": own}})
    assert elector_of(objects) is None
    assert '"user": "elector"' not in config
    assert "No elector runs: nats-server has logins of its own or none for electors" in notes
    objects, config, notes = whole_chart({"nats": {"config": own}, "elector": {"login": {"secret": "login-elector"}}})
    container = elector_of(objects)
    assert container is not None
    assert '"user": "elector"' not in config
    assert "--nats-user" not in container["args"]
    assert {"name": "HEADRACE_NATS_CONTEXT", "value": "/etc/headrace/logins/elector.json"} in container["env"]
    assert "No elector runs" not in notes


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({"nats": {"config": {"cluster": {"enabled": False}}}, "broker": {"replicas": 1}}, False),
        ({"nats": {"config": {"merge": {"elector": {"$tplYamlSpread": ""}}}}}, True),
        ({"elector": {"enabled": False}}, False),
        ({"nats": {"enabled": False}, "broker": {"url": "nats://elsewhere:4222"}}, True),
        ({"nats": {"enabled": False}, "broker": {"url": "nats://elsewhere:4222", "replicas": 1}}, False),
    ],
    ids=["one server", "login taken out", "off", "servers elsewhere", "one server elsewhere"],
)
@pytest.mark.parametrize("real", KINDS)
def test_without_a_cluster_or_a_login_none_runs(values: dict[str, Any], told: bool, real: bool) -> None:
    objects, config, notes = whole_chart(values, real=real)
    assert elector_of(objects) is None
    assert "elector" not in config or values == {"elector": {"enabled": False}}, "a login for nobody"
    assert ("No elector runs" in notes) == told


@pytest.mark.parametrize(
    ("release", "nats", "first", "service"),
    [
        ("mynats", {}, "mynats-0.mynats-headless", "mynats"),
        ("llm", {"fullnameOverride": "broker"}, "broker-0.broker-headless", "broker"),
        ("llm", {"nameOverride": "bus"}, "llm-bus-0.llm-bus-headless", "llm-bus"),
        ("llm", {"statefulSet": {"name": "s"}, "headlessService": {"name": "h"}}, "s-0.h", "llm-nats"),
        ("llm", {"service": {"name": "v"}}, "llm-nats-0.llm-nats-headless", "v"),
    ],
)
@pytest.mark.parametrize("real", KINDS)
def test_the_addresses_are_those_that_the_chart_of_nats_makes(
    release: str, nats: Any, first: str, service: str, real: bool
) -> None:
    objects, config, _ = whole_chart({"nats": {**nats, "config": {"cluster": {"replicas": 5}}}}, release=release, real=real)
    container = elector_of(objects)
    assert container is not None
    env = _url(container)
    assert env.split(",")[0] == f"nats://{first}.here.svc:4222"
    assert len(env.split(",")) == 5
    pods = {one["metadata"]["name"]: one["spec"]["template"]["spec"] for one in objects if one["kind"] == "Deployment"}
    (frontend,) = (spec["containers"][0] for name, spec in pods.items() if name.endswith("-frontend"))
    assert _url(frontend) == f"nats://{service}.here.svc:4222"
    (policy,) = (one for one in objects if one["kind"] == "NetworkPolicy" and one["metadata"]["name"].endswith("-nats"))
    labels = policy["spec"]["podSelector"]["matchLabels"]
    assert labels["app.kubernetes.io/name"] == nats.get("nameOverride", "nats")
    if real:
        assert service in [one["metadata"]["name"] for one in objects if one["kind"] == "Service"]
        (servers,) = (one["spec"]["template"] for one in objects if one["kind"] == "StatefulSet")
        assert labels.items() <= servers["metadata"]["labels"].items()
        assert parsed(config)["cluster"]["routes"][0] == f"nats://{first}:6222"


def _url(container: Any) -> Any:
    (found,) = (one["value"] for one in container["env"] if one["name"] == "HEADRACE_NATS_URL")
    return found
