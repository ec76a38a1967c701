"""Reads the manifests of `deploy/kubernetes`."""

from __future__ import annotations

from typing import Any

import yaml

from deploy.kubernetes.write import FOLDER


def manifests(name: str) -> list[dict[str, Any]]:
    return [document for document in yaml.safe_load_all((FOLDER / name).read_text()) if document]
