"""The bundled model as it is really made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.workers import bundled_model
from tests.engines.conftest import ROOT

pytestmark = pytest.mark.engine

ASSETS = ROOT / "workers" / "assets" / "smollm2"


def test_it_is_complete(model_dir: Path) -> None:
    assert bundled_model.is_ready(model_dir)
    assert json.loads((model_dir / "generation_config.json").read_bytes())["eos_token_id"] == 2
    assert json.loads((model_dir / "config.json").read_bytes())["dtype"] == "bfloat16"


def test_it_and_the_simulator_have_the_same_tokenizer_and_template(model_dir: Path) -> None:
    """What is tried on the simulator then holds for the model: same ids, same prompts."""
    ours, simulated = (json.loads((folder / "tokenizer.json").read_bytes()) for folder in (model_dir, ASSETS))
    assert ours == simulated
    assert (model_dir / "chat_template.jinja").read_text() == (ASSETS / "chat_template.jinja").read_text()
