"""A deployment that begins to ask for logins at NATS, and ceases to: what it has stored is there each time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from openai import AuthenticationError, OpenAI, omit

from headrace.client import ClientOptions
from headrace.client.sync import connect
from tests.support.up_process import RunningUp, started

pytestmark = pytest.mark.deployment

TIMEOUT_S = 60.0
LARGE = b"{}\n" * 100_000
WITH, WITHOUT, ONE = ("--nats-login", "roles"), ("--nats-login", "none"), ()


def headrace(folder: Path, *words: str) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-P", "-m", "headrace", *words]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def client(up: RunningUp, key: str) -> OpenAI:
    return OpenAI(base_url=f"{up.state()['url']}/v1", api_key=key, max_retries=0, timeout=TIMEOUT_S)


def answer_to(openai: OpenAI, text: str, after: str | None = None) -> tuple[str, str]:
    answer = openai.responses.create(model="sim", input=text, previous_response_id=after or omit, max_output_tokens=16)
    return answer.id, answer.output_text


def test_keys_files_answers_and_results_are_kept_when_logins_are_turned_on_and_off_again(tmp_path: Path) -> None:
    data_folder = ClientOptions(data_dir=tmp_path / ".headrace")
    with started(tmp_path, *WITHOUT) as up:
        assert not up.events("nats.streams_moved")
        key = json.loads(headrace(tmp_path, "keys", "create", "kept", "--json"))["secret"]
        with client(up, key) as openai:
            file = openai.files.create(file=("in.jsonl", LARGE), purpose="batch")
            first, text = answer_to(openai, "One")
        with connect(options=data_folder) as hr:
            body = {"model": "sim", "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
            result = hr.ask(body, id="one", priority="std", timeout_s=TIMEOUT_S).text
    for flags, moved in ((ONE, []), (WITH, [True]), (WITHOUT, [False])):
        with started(tmp_path, *flags) as up:
            assert [event["logins"] for event in up.events("nats.streams_moved")] == moved
            with client(up, "another") as stranger, pytest.raises(AuthenticationError):
                answer_to(stranger, "Let me in.")
            with client(up, key) as openai:
                assert openai.files.content(file.id).content == LARGE
                assert openai.responses.retrieve(first).output_text == text
                assert answer_to(openai, "Two", after=first)
            assert result in headrace(tmp_path, "jobs", "show", "one")
            log = tmp_path / ".headrace" / "nats" / "nats-server.log"
            assert "Violation" not in log.read_text()
