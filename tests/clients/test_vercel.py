"""Vercel's AI SDK by four of its providers. Needs node, and the folder that `make test-clients` installs it in."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path

import pytest
from conftest import CHAT

FOLDER = Path(os.environ.get("VERCEL", ""))

pytestmark = pytest.mark.skipif(
    shutil.which("node") is None or not (FOLDER / "node_modules" / "ai").is_dir(), reason="node or the package ai is missing"
)


@pytest.mark.parametrize("provider", ["compatible", "chat", "responses", "messages"])
def test_text_streams_tools_and_types(provider: str, url: str) -> None:
    words = ["node", str(FOLDER / "ask.mjs"), url, CHAT, provider]
    done = subprocess.run(words, capture_output=True, text=True, timeout=50, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    answer = json.loads(done.stdout)
    assert (answer["finish"], answer["tokens"]) == ("length", 16)
    assert answer["text"]
    assert answer["pieces"] > 1
    assert (answer["tools"], answer["results"]) == ([["weather", ["city"]]], 1)
    assert list(answer["typed"]) == ["city", "size"]
