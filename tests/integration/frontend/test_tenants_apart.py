"""Two tenants on one deployment: what one stored, asked or runs does not exist for the other, and its cache tells nothing."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import httpx
import pytest
from starlette.routing import Route

from headrace.broker.keys import CLIENT_SCOPES, KeyRecord, KeyStore
from headrace.jetstream.embedded_server import EmbeddedServer
from headrace.jetstream.subjects import Subjects
from headrace.workers.settings import WorkerSettings
from tests.conftest import Connect
from tests.support.frontend.fakes import FakeIngress, frontend
from tests.support.local_deployment import serving, sim

MODEL = "apart-sim"
FILMS = "apart-films"
WORDS = " ".join(f"word{n}" for n in range(200))
LINE = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions"}
HELD = {"args": {"timing_overrides": {"decode_base_s": 0.05}}}


def chat(text: str = "hi", **more: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 4, **more}


async def keys_for(store: KeyStore, *tenants: str) -> list[str]:
    scopes = [*CLIENT_SCOPES, "direct"]
    wishes = [KeyRecord(id="", name=t, tenant=t, hashes=[], scopes=scopes, created=0.0) for t in tenants]
    return [(await store.create(wish))[1] for wish in wishes]


def as_tenant(url: str, key: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, headers={"authorization": f"Bearer {key}"}, timeout=30)


def films(folder: Path) -> WorkerSettings:
    return WorkerSettings(
        engine="tests.support.painter:Painter",
        model=str(folder / "videos"),
        served_name=FILMS,
        engine_args={"fps": 4},
        drain_grace_s=0.0,
        tool_parser="none",
        reasoning_parser="none",
    )


async def both_are_served(client: httpx.AsyncClient) -> None:
    async with asyncio.timeout(20):
        while (await client.get(f"/v1/models/{MODEL}")).status_code != 200 or (
            await client.get(f"/v1/models/{FILMS}")
        ).status_code != 200:
            await asyncio.sleep(0.02)


async def made_film(client: httpx.AsyncClient) -> dict[str, Any]:
    """Make a video and wait for its file."""
    video = await made(client, "/v1/videos", json={"model": FILMS, "prompt": "a river", "seconds": "1", "size": "96x64"})
    async with asyncio.timeout(20):
        while (await client.get(f"/v1/videos/{video['id']}")).json()["status"] != "completed":
            await asyncio.sleep(0.02)
    return video


def routes_with_ids() -> list[tuple[str, str]]:
    app = frontend(FakeIngress()).app
    starlette: Any = app._app  # type: ignore[attr-defined]
    found = [(m, r.path) for r in starlette.routes if isinstance(r, Route) and "{" in r.path for m in r.methods or ()]
    return sorted((method, path) for method, path in found if "/v1/models" not in path)


async def made(client: httpx.AsyncClient, path: str, **request: Any) -> dict[str, Any]:
    answer = await client.post(path, **request)
    assert answer.status_code == 200, (path, answer.text)
    found: dict[str, Any] = answer.json()
    return found


async def things_of(client: httpx.AsyncClient) -> dict[str, dict[str, str]]:
    """Make one of everything that has an id. Returns the values of each path's places."""
    response = await made(client, "/v1/responses", json={"model": MODEL, "input": "hi", "max_output_tokens": 4})
    stored = await made(client, "/v1/chat/completions", json=chat(store=True))
    item = {"type": "message", "role": "user", "content": "hello"}
    conversation = await made(client, "/v1/conversations", json={"items": [item]})
    items = (await client.get(f"/v1/conversations/{conversation['id']}/items")).json()["data"]
    line = json.dumps({**LINE, "body": chat()})
    form = {"files": {"file": ("in.jsonl", line.encode())}, "data": {"purpose": "batch"}}
    file = await made(client, "/v1/files", **form)
    wish = {"filename": "f", "purpose": "user_data", "bytes": 4, "mime_type": "text/plain"}
    upload = await made(client, "/v1/uploads", json=wish)
    batch_wish = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
    batch = await made(client, "/v1/batches", json=batch_wish)
    async with client.stream(
        "POST", "/v1/chat/completions", json=chat(stream=True), headers={"Headrace-Durable": "1"}
    ) as durable:
        await durable.aread()
        job = durable.headers["headrace-job"]
    return {
        "/v1/responses": {"id": response["id"]},
        "/v1/streams": {"job": job},
        "/v1/chat/completions": {"id": stored["id"]},
        "/v1/conversations": {"id": conversation["id"], "item_id": items[0]["id"]},
        "/v1/files": {"id": file["id"]},
        "/v1/uploads": {"id": upload["id"]},
        "/v1/batches": {"id": batch["id"]},
        "/v1/videos": {"id": (await made_film(client))["id"]},
        "/v1/requests": {"id": "alices-request"},
    }


def filled(path: str, things: dict[str, dict[str, str]]) -> str:
    base = next(base for base in things if path.startswith(f"{base}/"))
    return path.replace(":path", "").format(**things[base])


@pytest.mark.slow
async def test_no_route_shows_or_changes_what_belongs_to_another_tenant(
    nats_server: EmbeddedServer, connect: Connect, subjects: Subjects, tmp_path: Path
) -> None:
    bodies = {
        "/v1/uploads/{id}/parts": {"files": {"data": ("p", b"abcd")}},
        "/v1/uploads/{id}/complete": {"json": {"part_ids": ["part_x"]}},
        "/v1/conversations/{id}/items": {"json": {"items": [{"type": "message", "role": "user", "content": "x"}]}},
        "/v1/conversations/{id}": {"json": {"metadata": {"a": "b"}}},
        "/v1/chat/completions/{id:path}": {"json": {"metadata": {"a": "b"}}},
    }
    workers = sim(MODEL, **HELD), films(tmp_path / "pipeline")
    async with serving(nats_server, subjects, *workers, api_key=("operator",)) as running:
        alice_key, mallory_key = await keys_for(KeyStore(await connect(), subjects), "alice", "mallory")
        async with as_tenant(running.url, alice_key) as alice, as_tenant(running.url, mallory_key) as mallory:
            await both_are_served(mallory)
            things = await things_of(alice)
            asked = asyncio.create_task(
                alice.post("/v1/chat/completions", json=chat(max_tokens=400), headers={"x-request-id": "alices-request"})
            )
            await asyncio.sleep(0.3)
            for method, path in routes_with_ids():
                body = bodies.get(path, {}) if method == "POST" else {}
                answer = await mallory.request(method, filled(path, things), **body)
                assert answer.status_code == 404, (method, path, answer.status_code, answer.text)
            assert not asked.done()
            for path, wish in (
                ("/v1/responses", {"model": MODEL, "input": "x", "previous_response_id": things["/v1/responses"]["id"]}),
                ("/v1/responses", {"model": MODEL, "input": "x", "conversation": things["/v1/conversations"]["id"]}),
                (
                    "/v1/batches",
                    {
                        "input_file_id": things["/v1/files"]["id"],
                        "endpoint": "/v1/chat/completions",
                        "completion_window": "24h",
                    },
                ),
            ):
                answer = await mallory.post(path, json=wish)
                assert answer.status_code in (400, 404), (path, answer.text)
            back = {"Headrace-Durable": "1", "Last-Event-ID": f"{things['/v1/streams']['job']}.1"}
            assert (await mallory.post("/v1/chat/completions", json=chat(stream=True), headers=back)).status_code == 404
            for path in ("/v1/files", "/v1/batches", "/v1/chat/completions", "/v1/videos"):
                assert (await mallory.get(path)).json()["data"] == []
            for method, path in routes_with_ids():
                if method == "GET":
                    assert (await alice.get(filled(path, things))).status_code == 200, path
            assert (await alice.delete("/v1/requests/alices-request")).status_code == 200
            assert (await asked).status_code == 499


async def test_counts_of_cached_tokens_tell_nothing_of_another_tenant(
    nats_server: EmbeddedServer, connect: Connect, subjects: Subjects
) -> None:
    async with serving(nats_server, subjects, sim(MODEL), api_key=("operator",)) as running:
        alice_key, mallory_key = await keys_for(KeyStore(await connect(), subjects), "alice", "mallory")
        async with as_tenant(running.url, alice_key) as alice, as_tenant(running.url, mallory_key) as mallory:

            async def cached(client: httpx.AsyncClient, **more: Any) -> int:
                answer = await made(client, "/v1/chat/completions", json=chat(WORDS, **more))
                return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])

            async with asyncio.timeout(10):
                while (await mallory.get("/v1/models")).status_code != 200:
                    await asyncio.sleep(0.02)
            assert await cached(alice) == 0
            async with asyncio.timeout(10):
                while not await cached(alice):
                    await asyncio.sleep(0.05)
            assert await cached(mallory) == 0
            assert await cached(mallory, cache_salt="alice") == 0
            assert await cached(alice, cache_salt="own") == 0
            assert await cached(alice) > 0


async def test_without_keys_tenants_share_the_cache_unless_they_are_kept_apart(
    nats_server: EmbeddedServer, subjects: Subjects
) -> None:
    for isolation, shared in (("off", True), ("on", False)):
        body = {**chat(WORDS), "model": f"{MODEL}-{isolation}"}
        async with (
            serving(nats_server, subjects, sim(body["model"]), cache_isolation=isolation) as running,
            httpx.AsyncClient(base_url=running.url, timeout=30) as client,
        ):
            await cached_of(client, "alice", body)
            async with asyncio.timeout(10):
                while not await cached_of(client, "alice", body):
                    await asyncio.sleep(0.05)
            assert (await cached_of(client, "mallory", body) > 0) is shared


async def cached_of(client: httpx.AsyncClient, tenant: str, body: dict[str, Any]) -> int:
    answer = await client.post("/v1/chat/completions", json=body, headers={"x-headrace-tenant": tenant})
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])
