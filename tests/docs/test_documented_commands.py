"""What the documentation tells people to type works, against a running `headrace up --engine sim`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.docs.blocks import ROOT, Block, blocks_of, documents
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.deployment

BLOCKS = [block for path in documents() if path.is_file() for block in blocks_of(path.read_text(), str(path.relative_to(ROOT)))]
TIMEOUT_S = 60


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    running = RunningUp(tmp_path_factory.mktemp("up"))
    try:
        running.until_ready()
        yield running
    finally:
        running.stop()


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_a_documented_command_works(block: Block, up: RunningUp, tmp_path: Path) -> None:
    state = up.state()
    text = block.text.replace("127.0.0.1:8000", state["url"].removeprefix("http://"))
    text = text.replace("nats://127.0.0.1:4222", state["nats"]["url"])
    (tmp_path / ".venv").symlink_to(sys.prefix)
    (tmp_path / ".headrace").symlink_to(up.run_file.parents[1])
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    environment["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{environment['PATH']}"
    command = ["bash", "-euo", "pipefail", "-c", text] if block.language == "sh" else [sys.executable, "-c", text]
    done = subprocess.run(
        command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == block.exit_code, f"{block}\n{text}\n{done.stdout}\n{done.stderr}"
