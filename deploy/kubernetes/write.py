"""Writes the plain manifests from the chart and the values beside it: `python -m deploy.kubernetes.write`. A test compares."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

FOLDER = Path(__file__).parent
CHART = FOLDER.parent / "helm" / "headrace"
RELEASE = "headrace"
_OF_HELM = ("helm.sh/chart", "app.kubernetes.io/managed-by")


def texts(values: dict[str, Any], *, name: str = RELEASE, namespace: str = RELEASE) -> list[str]:
    """Return what the templates of the chart make of these values. Raises HelmError for values that its schema refuses."""
    import helm_python  # a large library, which `make charts` installs

    with helm_python.Chart.load(CHART) as chart:
        chart.validate_schema(values)
        found = chart.render(values, name=name, namespace=namespace)
    return [found[path] for path in sorted(found) if path.startswith("headrace/") and path.endswith(".yaml")]


def rendered(values: dict[str, Any], *, name: str = RELEASE, namespace: str = RELEASE) -> list[dict[str, Any]]:
    """Return the objects that the chart makes of these values. Raises HelmError for values that its schema refuses."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = texts(values, name=name, namespace=namespace)
    return [document for text in found for document in yaml.load_all(text, Loader=loader) if document]


def files() -> dict[Path, str]:
    """Return each manifest and its text."""
    found = {}
    for path in sorted(FOLDER.glob("*.values.yaml")):
        name = path.name.removesuffix(".values.yaml")
        head = f"# Made by `python -m deploy.kubernetes.write` from {path.name}.\n"
        objects = [_without_helm(document) for document in rendered(yaml.safe_load(path.read_text()))]
        found[FOLDER / f"{name}.yaml"] = head + yaml.safe_dump_all(objects, sort_keys=False, width=120)
    return found


def _without_helm(value: Any) -> Any:
    """Leave out the labels by which Helm knows its own."""
    if isinstance(value, dict):
        return {key: _without_helm(item) for key, item in value.items() if key not in _OF_HELM}
    return [_without_helm(item) for item in value] if isinstance(value, list) else value


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
