"""A `headrace up` whose store is encrypted: what clients store cannot be read on its disk, and its key is nobody else's."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from headrace.client import ClientOptions
from headrace.client.sync import connect
from tests.support.up_logins import headrace
from tests.support.up_process import RunningUp, started

pytestmark = pytest.mark.deployment

TIMEOUT_S = 60.0
SECRET = "the password is correct horse battery staple"
EXIT_CONFIGURATION = 78


def store(up: RunningUp) -> str:
    """Leave the secret in a response, a file, a batch with its results, and a job; return the id of the response."""
    line = {
        "custom_id": "1",
        "method": "POST",
        "url": "/v1/chat/completions",
        "body": {"model": "sim", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4},
    }
    with OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as openai:
        response = openai.responses.create(model="sim", input=SECRET, max_output_tokens=4)
        file = openai.files.create(file=("in.jsonl", (json.dumps(line) + "\n").encode()), purpose="batch")
        batch = openai.batches.create(input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h")
        up.until("the batch has ended", lambda: openai.batches.retrieve(batch.id).status == "completed")
    with connect(options=ClientOptions(data_dir=up.run_file.parents[1])) as hr:
        body = {"model": "sim", "messages": [{"role": "user", "content": SECRET}], "max_tokens": 4}
        hr.ask(body, id="one", priority="std", timeout_s=TIMEOUT_S)
    return response.id


def secret_files(folder: Path) -> set[str]:
    return {file.name for file in (folder / ".headrace").rglob("*") if file.is_file() and SECRET.encode() in file.read_bytes()}


def test_prompts_files_and_results_are_in_no_file_and_are_kept_over_a_restart(tmp_path: Path) -> None:
    with started(tmp_path, "--nats-encrypt", "aes") as up:
        response = store(up)
    with started(tmp_path, "--nats-encrypt", "aes") as up:
        with OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", timeout=TIMEOUT_S) as openai:
            assert openai.responses.retrieve(response).output_text
            assert [file.filename for file in openai.files.list().data].count("in.jsonl") == 1
        assert "one" in headrace(up, "jobs", "show", "one")
    assert not secret_files(tmp_path)


def test_nobody_but_the_server_is_told_the_key_and_with_another_one_up_does_not_start(tmp_path: Path) -> None:
    with started(tmp_path, "--nats-encrypt", "aes") as up:
        file = up.run_file.parents[1] / "nats" / "store.key"
        key = file.read_text().strip()
        server = up.state()["nats"]["pid"]
        for pid in up.pids():
            assert key.encode() not in Path(f"/proc/{pid}/cmdline").read_bytes()
            assert (key.encode() in Path(f"/proc/{pid}/environ").read_bytes()) == (pid == server)
        shown = [headrace(up, "config"), up.log_file.read_text(), up.out_file.read_text(), up.run_file.read_text()]
        shown += [path.read_text() for path in file.parent.glob("nats-server.*")]
        assert not [text for text in shown if key in text]
        assert up.chat()
    for other in ("0" * 64, None):
        file.write_text(other) if other else file.unlink()
        command = [
            sys.executable,
            "-P",
            "-m",
            "headrace",
            "up",
            "--engine",
            "sim",
            "--port",
            "0",
            "--no-console",
            "--nats-encrypt",
            "aes",
        ]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
        assert done.returncode == EXIT_CONFIGURATION
        assert str(file) in done.stderr
    file.write_text(key)
    with started(tmp_path, "--nats-encrypt", "aes") as up:
        assert up.chat()
