"""Checks objects of Kubernetes as an API server of a version would, unknown fields being faults, and looks into their pods."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry, Resource

SCHEMAS = Path(__file__).parents[1] / "unit" / "deploy" / "schemas"
CUSTOM = {
    ("keda.sh/v1alpha1", "ScaledObject"): "scaledobject-v1alpha1.json",
    ("monitoring.coreos.com/v1", "PodMonitor"): "podmonitor-v1.json",
    ("leaderworkerset.x-k8s.io/v1", "LeaderWorkerSet"): "leaderworkerset-v1.json",
}
GROUP_SCALE = {
    "specReplicasPath": ".spec.replicas",
    "statusReplicasPath": ".status.replicas",
    "labelSelectorPath": ".status.hpaPodSelector",
}
VERSIONS = tuple(f"1.{minor}" for minor in range(25, 38))
Object = dict[str, Any]

needs_tools = pytest.mark.skipif(
    find_spec("helm_python") is None or find_spec("kubernetes_validate") is None,
    reason="`make charts` installs Helm's engine and the schemas of Kubernetes",
)


def faults(thing: Object, version: str) -> list[str]:
    """Return what an API server of this version would find wrong with an object, or what it would drop without a word."""
    kind = (thing["apiVersion"], thing["kind"])
    name = f"{thing['kind']}/{thing['metadata']['name']}"
    if kind in CUSTOM:
        found = _told(_custom(CUSTOM[kind]), thing)
        pods = [Object(apiVersion="v1", kind="Pod", **template) for template in pod_templates(thing)]
        found += [fault for pod in pods for fault in _told(_core(version, "v1", "Pod"), pod)]
    else:
        found = _told(_core(version, *kind), thing)
    return [f"{name}: {fault}" for fault in found]


def _told(validator: Any, thing: Object) -> list[str]:
    return [f"{'.'.join(map(str, error.path))}: {error.message[:300]}" for error in validator.iter_errors(thing)]


@cache
def _registry(version: str) -> Any:
    text = (_folder(version) / "_definitions.json").read_text()
    return Resource.from_contents(json.loads(text)) @ Registry()


def _folder(version: str) -> Any:
    return files("kubernetes_validate") / "kubernetes-json-schema" / f"v{version}.0-local-strict"


@cache
def _core(version: str, api: str, kind: str) -> Any:
    group, _, last = api.rpartition("/")
    short = f"{group.partition('.')[0]}-{last}" if group else last
    schema = json.loads((_folder(version) / f"{kind.lower()}-{short}.json").read_text())
    return jsonschema.Draft202012Validator(schema, registry=_registry(version))


@cache
def _custom(file: str) -> Any:
    schema = json.loads((SCHEMAS / file).read_text())
    schema["properties"]["metadata"] = {"type": "object"}
    return jsonschema.Draft202012Validator(_closed(schema))


def _closed(schema: Any) -> Any:
    """Refuse what the schema does not name: a server drops it, and it has no effect."""
    if isinstance(schema, list):
        return [_closed(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    closed = {key: _closed(value) for key, value in schema.items()}
    if closed.pop("x-kubernetes-int-or-string", False):
        closed.pop("anyOf", None)
        closed.pop("type", None)
        closed["type"] = ["integer", "string"]
    if (
        isinstance(closed.get("properties"), dict)
        and "type" in closed
        and not closed.pop("x-kubernetes-preserve-unknown-fields", 0)
    ):
        closed.setdefault("additionalProperties", False)
    return closed


def custom_resources() -> list[Object]:
    """Return the definitions of the custom resources that the chart may use, for a server that does not know them."""
    found = []
    for (version, kind), file in CUSTOM.items():
        group, _, last = version.partition("/")
        schema = json.loads((SCHEMAS / file).read_text())
        if kind == "LeaderWorkerSet":
            schema["properties"]["spec"]["properties"]["replicas"]["default"] = 1  # defaults are left out of the file
        served = {"name": last, "served": True, "storage": True, "schema": {"openAPIV3Schema": schema}}
        served["subresources"] = {"status": {}} | ({"scale": GROUP_SCALE} if kind == "LeaderWorkerSet" else {})
        names = {"kind": kind, "plural": f"{kind.lower()}s", "singular": kind.lower(), "listKind": f"{kind}List"}
        spec = {"group": group, "scope": "Namespaced", "names": names, "versions": [served]}
        name = {"name": f"{names['plural']}.{group}"}
        if group.endswith("k8s.io"):  # such groups are Kubernetes' own, and need a word of its reviewers
            name["annotations"] = {"api-approved.kubernetes.io": "unapproved, of a test"}
        found.append(
            {"apiVersion": "apiextensions.k8s.io/v1", "kind": "CustomResourceDefinition", "metadata": name, "spec": spec}
        )
    return found


def pod_templates(thing: Object) -> list[Object]:
    """Return the pod templates of an object."""
    match thing["kind"]:
        case "Deployment" | "StatefulSet":
            return [thing["spec"]["template"]]
        case "LeaderWorkerSet":
            group = thing["spec"]["leaderWorkerTemplate"]
            return [group["leaderTemplate"], group["workerTemplate"]]
        case _:
            return []


def containers(things: list[Object]) -> Iterator[tuple[Object, Object, Object]]:
    """Each container with its pod template and its object."""
    for thing in things:
        for template in pod_templates(thing):
            for container in template["spec"]["containers"]:
                yield container, template, thing


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return bool(selector) and selector.items() <= labels.items()
