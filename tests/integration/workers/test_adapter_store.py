"""Adapters that were pushed into the deployment, loaded by its workers, and unloaded when there is no slot for one more."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
import pytest_asyncio

from headrace.cli import main
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.sim.tokens import expected_text
from tests.support.adapter_folders import adapter_folder
from tests.support.local_deployment import serving, sim

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]

PROMPT = [5, 6, 7, 8]


class Deployment:
    """Two workers with two slots for adapters each, one of which is taken from the start."""

    def __init__(self, api: httpx.AsyncClient, server: EmbeddedServer, names: Subjects) -> None:
        self.api = api
        self._to = ("--nats", server.url, "--prefix", names.prefix)

    async def command(self, *words: str) -> int:
        return await asyncio.to_thread(main, [*words, *self._to])

    async def load(self, name: str, source: str) -> int:
        return await self.command("worker", "adapter", "load", name, source, "--model", "acme/one")

    async def say(self, model: str) -> str:
        body = {"model": model, "prompt": PROMPT, "max_tokens": 4, "temperature": 0}
        async with asyncio.timeout(20):
            while (answer := await self.api.post("/v1/completions", json=body)).status_code == 404:
                await asyncio.sleep(0.05)  # the ingress has not read the card yet
        return str(answer.json()["choices"][0]["text"])


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def deployment(nats_server: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Deployment]:
    names = Subjects(f"store{os.getpid()}")
    cache = str(tmp_path_factory.mktemp("cache"))
    workers = [
        sim("acme/one", worker_name=name, args={"adapters": ["law"]}, adapter_slots=2, adapter_cache=cache)
        for name in ("first", "second")
    ]
    async with (
        serving(nats_server, names, *workers) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as api,
    ):
        yield Deployment(api, nats_server, names)


async def test_what_is_pushed_here_is_loaded_there(
    deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(adapter_folder(tmp_path / "sql"))
    assert await deployment.command("adapter", "push", "sql", folder) == 0
    assert "load it from store://sql" in capsys.readouterr().out
    assert await deployment.command("adapter", "ls") == 0
    assert "sql" in capsys.readouterr().out
    assert await deployment.load("sql", "store://sql") == 0
    assert await deployment.say("sql") == expected_text(PROMPT, 4, adapter="sql")
    assert await deployment.command("adapter", "rm", "sql") == 0
    assert await deployment.say("sql") == expected_text(PROMPT, 4, adapter="sql"), "workers have their own copy"
    assert await deployment.command("adapter", "rm", "sql") == 1
    assert "no adapter 'sql' was pushed" in capsys.readouterr().err


async def test_for_one_more_the_least_recently_used_makes_room_and_never_one_of_the_start(
    deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = str(adapter_folder(tmp_path / "tax"))
    assert await deployment.command("adapter", "push", "tax", folder) == 0
    assert await deployment.load("tax", "store://tax") == 0
    assert await deployment.say("tax") == expected_text(PROMPT, 4, adapter="tax")
    assert await deployment.say("law") == expected_text(PROMPT, 4, adapter="law")
    capsys.readouterr()
    assert await deployment.command("model", "ls") == 0
    assert "law (2), tax (2)" in capsys.readouterr().out


async def test_what_must_not_or_cannot_be_loaded_is_refused_by_name(
    deployment: Deployment, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for source, why in (
        ("hf://org/sql", "adapters from hf://org/sql are not allowed here"),
        ("store://nothing", "store://nothing cannot be read"),
        ("ftp://host/sql", "begins with 'ftp'"),
    ):
        assert await deployment.load("other", source) == 1
        assert why in capsys.readouterr().err
    bad = adapter_folder(tmp_path / "bad", weights=b"\x80\x04]\x94.")
    assert await deployment.command("adapter", "push", "bad", str(bad)) == 1
    assert "is no safetensors file" in capsys.readouterr().err
