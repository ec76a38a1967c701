"""A worker with a chat template and endpoints of the operator's choice, as clients see it."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.errors import EngineStartFailed
from tests.support.local_deployment import serving, sim

CHAT = {"messages": [{"role": "user", "content": "Hello there"}], "max_tokens": 2}


async def test_chats_are_rendered_by_the_operators_template_and_other_endpoints_refused(
    nats_server: EmbeddedServer, subjects: Subjects, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}TO {{ message.role }}: {{ message.content }}.{% endfor %}")
    models = (sim("own", chat_template=str(template)), sim("plain", endpoints=("completion",)))
    async with (
        serving(nats_server, subjects, *models) as running,
        httpx.AsyncClient(base_url=running.url, timeout=30) as client,
    ):
        tokens = (await client.post("/tokenize", json={"model": "own", **CHAT})).json()["tokens"]
        shown = await client.post("/detokenize", json={"model": "own", "tokens": tokens})
        assert shown.json()["prompt"] == "TO user: Hello there."
        assert (await client.post("/v1/chat/completions", json={"model": "own", **CHAT})).status_code == 200

        said = await client.post("/v1/completions", json={"model": "plain", "prompt": "Hello", "max_tokens": 2})
        assert said.status_code == 200
        refused = await client.post("/v1/chat/completions", json={"model": "plain", **CHAT})
        assert refused.status_code == 400
        assert "completion" in refused.json()["error"]["message"]


async def test_a_template_that_does_not_compile_stops_the_start(
    nats_server: EmbeddedServer, subjects: Subjects, tmp_path: Path
) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{% for message in messages %}")
    async with serving(nats_server, subjects) as running:
        with pytest.raises(EngineStartFailed, match="does not compile"):
            await running.start(sim("own", chat_template=str(template)))
