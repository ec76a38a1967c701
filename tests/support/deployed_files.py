"""What the chart makes for nats-server, by NATS' own chart where HEADRACE_NATS_CHART names its folder, and by a stand-in."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from pathlib import Path
from typing import Any

import yaml

from deploy.kubernetes.write import CHART, FOLDER

NATS_CHART = os.environ.get("HEADRACE_NATS_CHART", "")
# The stand-in tells its values, with the login of electors as NATS' chart makes it: by `tpl`, in its own context.
_TOLD = """apiVersion: v1
kind: ConfigMap
metadata: {name: told}
data:
  values: {{ toJson .Values | quote }}
  {{- $elector := get ((.Values.config.merge | default dict).elector | default dict) "$tplYamlSpread" }}
  elector: {{ tpl $elector . | fromYaml | toJson | quote }}
"""


def manifests(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]


def whole_chart(values: dict[str, Any], *, real: bool = False, release: str = "llm") -> tuple[list[dict[str, Any]], str, str]:
    """Return the objects of our chart, the configuration of nats-server that comes with them, and the notes.

    `real`: by NATS' own chart, with its objects.
    """
    import helm_python

    with tempfile.TemporaryDirectory() as folder:
        ours = Path(shutil.copytree(CHART, Path(folder) / "headrace"))
        below = ours / "charts" / "nats"
        if real:
            shutil.copytree(NATS_CHART, below)
        else:
            (below / "templates").mkdir(parents=True)
            (below / "Chart.yaml").write_text(json.dumps({"apiVersion": "v2", "name": "nats", "version": "2.14.2"}))
            (below / "templates" / "told.yaml").write_text(_TOLD)
        with helm_python.Chart.load(ours) as chart:
            chart.validate_schema(values)
            found = chart.render(values, name=release, namespace="here")
    own = [text for path, text in sorted(found.items()) if (real or "/charts/" not in path) and path.endswith(".yaml")]
    objects = [document for text in own for document in yaml.safe_load_all(text) if document]
    notes = found.get("headrace/templates/NOTES.txt", "")
    maps = [one for path, text in found.items() if "/charts/nats/" in path for one in yaml.safe_load_all(text) if one]
    told = next((one["data"] for one in maps if one["kind"] == "ConfigMap"), {})
    return objects, told.get("nats.conf") or (_config(told) if told else ""), notes


def _config(told: dict[str, str]) -> str:
    """Return a configuration with what NATS' chart makes of the values that matter here."""
    config = json.loads(told["values"])["config"]
    merge = {key: value for key, value in config["merge"].items() if key != "elector"}
    made = {
        "server_name": "<<SERVER_NAME>>",
        "port": 4222,
        "jetstream": {"store_dir": "/data"},
        "cluster": {"name": "llm-nats", "port": 6222, "no_advertise": True, "routes": ["nats://llm-nats-0:6222"]},
        **merge,
        **json.loads(told["elector"]),
    }
    return json.dumps(made, indent=2).replace('"<<SERVER_NAME>>"', "$SERVER_NAME")


def elector_of(objects: list[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the container of the electors among these objects."""
    for thing in objects:
        if thing["kind"] == "Deployment" and thing["metadata"]["labels"]["app.kubernetes.io/component"] == "elector":
            container: dict[str, Any] = thing["spec"]["template"]["spec"]["containers"][0]
            return container
    return None
