"""Writes the dashboards as JSON files beside this one: `python -m deploy.grafana.write`. A test compares."""

from __future__ import annotations

import json
from pathlib import Path

from deploy.grafana.pages import DASHBOARDS
from deploy.grafana.panels import dashboard_json

FOLDER = Path(__file__).parent


def files() -> dict[Path, str]:
    """Return each file and its text."""
    return {FOLDER / f"{page.uid}.json": json.dumps(dashboard_json(page), indent=1) + "\n" for page in DASHBOARDS}


if __name__ == "__main__":
    for path, text in files().items():
        path.write_text(text)
