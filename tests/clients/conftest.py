"""A deployment with the simulator, for clients in an environment of their own, where Headrace is not installed.

`HEADRACE` names the command that starts it, by default the one in `.venv` of this repository.
"""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

COMMAND = os.environ.get("HEADRACE") or str(Path(__file__).parents[2] / ".venv" / "bin" / "headrace")
CHAT, EMBED = "acme/chat", "acme/embed"
START_S = 60.0

os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it looks for prices on the internet


def state_of(folder: Path) -> dict[str, Any]:
    try:
        state: dict[str, Any] = json.loads((folder / ".headrace" / "run" / "up.json").read_text())
    except (OSError, ValueError):
        return {}
    return state


@pytest.fixture(scope="session")
def launch(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Path]]:
    """`launch(name, *flags)` starts a deployment and returns the folder that it runs in."""
    running: list[subprocess.Popen[bytes]] = []

    def up(name: str, *flags: str) -> Path:
        folder = tmp_path_factory.mktemp("up")
        words = [*COMMAND.split(), "up", "--engine", "sim", "--port", "0", "--served-name", name, *flags]
        env = {key: value for key, value in os.environ.items() if not key.startswith("HEADRACE")}
        with (folder / "log").open("wb") as log:
            process = subprocess.Popen(words, cwd=folder, stdout=log, stderr=log, env=env, start_new_session=True)
        running.append(process)
        deadline = time.monotonic() + START_S
        while not state_of(folder).get("ready"):
            assert process.poll() is None, (folder / "log").read_text()[-3000:]
            assert time.monotonic() < deadline, (folder / "log").read_text()[-3000:]
            time.sleep(0.05)
        return folder

    yield up
    for process in running:
        process.terminate()
    for process in running:
        process.wait(20)


@pytest.fixture(scope="session")
def start(launch: Callable[..., Path]) -> Callable[..., str]:
    """`start(name, *flags)` starts a deployment and returns its URL."""
    return lambda name, *flags: str(state_of(launch(name, *flags))["url"])


@pytest.fixture(scope="session")
def url(start: Callable[..., str]) -> str:
    """The base URL of a deployment that serves `CHAT`, whose answers are taken apart."""
    return start(CHAT, "--tool-parser", "hermes", "--reasoning-parser", "think")


@pytest.fixture(scope="session")
def embed_url(start: Callable[..., str]) -> str:
    """The base URL of a deployment that serves `EMBED`."""
    return start(EMBED, "--engine-arg", "pooling=embed")


def called(name: str, **arguments: Any) -> str:
    """The text of an answer that calls a tool."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


class Scripted(httpx.AsyncHTTPTransport):
    """Prescribes the answers of the simulator, one for each request, and keeps what was sent."""

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self.answers = list(answers)
        self.bodies: list[Any] = []

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        if request.method == "POST":
            body = json.loads(await request.aread())
            self.bodies.append(body)
            body = body | {"vllm_xargs": {"sim_answer": self.answers.pop(0)}}
            headers = {key: value for key, value in request.headers.items() if key != "content-length"}
            request = httpx.Request(request.method, request.url, headers=headers, json=body, extensions=request.extensions)
        return await super().handle_async_request(request)


@pytest.fixture
def scripted() -> Callable[..., tuple[httpx.AsyncClient, Scripted]]:
    """`scripted(*answers)` returns an HTTP client with prescribed answers, and what records its requests."""

    def made(*answers: str) -> tuple[httpx.AsyncClient, Scripted]:
        transport = Scripted(*answers)
        return httpx.AsyncClient(transport=transport, timeout=30), transport

    return made
