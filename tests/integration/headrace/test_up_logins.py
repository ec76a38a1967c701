"""A `headrace up` whose NATS server asks for logins: everything works, and no part asks for more than it may."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from openai import OpenAI

from headrace.broker.codec import decode, encode
from headrace.broker.models.cards import CardFile, ModelCard
from headrace.client import ClientOptions, NotAllowed, NotSubmitted, connect
from headrace.jetstream.client import Connection, ConnectOptions
from headrace.jetstream.errors import AccessDenied
from headrace.jetstream.subjects import Subjects
from tests.support.up_logins import folder_of, headrace, violations
from tests.support.up_process import RunningUp, routed_up

pytestmark = pytest.mark.deployment

TIMEOUT_S = 60.0
MODEL = "sim"


@pytest.fixture(scope="module")
def up(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningUp]:
    folder = tmp_path_factory.mktemp("logins")
    wanted = ("--nats-login", "roles", "--nats-tenants", "acme,rival")
    with routed_up(folder, *wanted, "--workers", "2", "--log-format", "json") as running:
        yield running


@pytest.fixture
def openai(up: RunningUp) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=TIMEOUT_S) as client:
        yield client


def until(what: str, met: Any, within_s: float = TIMEOUT_S) -> Any:
    deadline = time.monotonic() + within_s
    while not (found := met()):
        assert time.monotonic() < deadline, f"not in time: {what}"
        time.sleep(0.1)
    return found


def chat(openai: OpenAI, text: str, **options: Any) -> str:
    messages: Any = [{"role": "user", "content": text}]
    answer = openai.chat.completions.create(model=MODEL, messages=messages, max_tokens=8, **options)
    return answer.choices[0].message.content or ""


def test_chats_are_answered_streamed_and_whole_and_large(openai: OpenAI, up: RunningUp) -> None:
    assert chat(openai, "Say hello.")
    stream = openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Go on."}], max_tokens=20, stream=True
    )
    assert sum(bool(chunk.choices and chunk.choices[0].delta.content) for chunk in stream) > 1
    spilled = openai.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Spill."}],
        max_tokens=2,
        extra_body={"allowed_token_ids": [1000] * 250_000},  # more than a message holds
    )
    assert spilled.choices
    assert not violations(up)


def test_answers_are_stored_continued_and_made_in_the_background(openai: OpenAI, up: RunningUp) -> None:
    first = openai.responses.create(model=MODEL, input="One", max_output_tokens=16)
    second = openai.responses.create(model=MODEL, input="Two", previous_response_id=first.id, max_output_tokens=16)
    assert openai.responses.retrieve(second.id).output_text
    openai.responses.delete(first.id)
    begun = openai.responses.create(model=MODEL, input="Later", background=True, max_output_tokens=16)
    until("the answer", lambda: openai.responses.retrieve(begun.id).status in ("completed", "incomplete"))
    kept: Any = openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Keep it."}], max_tokens=4, store=True
    )
    until("the stored chat", lambda: kept.id in {one.id for one in openai.chat.completions.list()})
    conversation = openai.conversations.create(items=[{"type": "message", "role": "user", "content": "Hi"}])
    assert openai.conversations.items.list(conversation.id).data
    assert not violations(up)


def test_a_batch_is_carried_and_its_files_can_be_read(openai: OpenAI, up: RunningUp) -> None:
    lines = [
        {
            "custom_id": f"c{n}",
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"model": MODEL, "messages": [{"role": "user", "content": f"{n}"}], "max_tokens": 4},
        }
        for n in range(20)
    ]
    data = "".join(json.dumps(line) + "\n" for line in lines).encode()
    source = openai.files.create(file=("in.jsonl", data), purpose="batch")
    made = openai.batches.create(input_file_id=source.id, endpoint="/v1/chat/completions", completion_window="24h")
    batch: Any = until("the batch", lambda: (b := openai.batches.retrieve(made.id)).status in ("completed", "failed") and b)
    assert batch.request_counts.completed == 20
    assert len(openai.files.content(batch.output_file_id).text.splitlines()) == 20
    openai.files.delete(batch.output_file_id)
    assert not violations(up)


def test_durable_streams_can_be_read_again(up: RunningUp) -> None:
    url = up.state()["url"]
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Durable."}], "max_tokens": 8, "stream": True}
    with httpx.Client(base_url=url, timeout=TIMEOUT_S) as client:
        asked = client.post("/v1/chat/completions", json=body, headers={"x-headrace-durable": "one"})
        assert asked.status_code == 200, asked.text
    assert not violations(up)


@pytest.mark.parametrize(
    ("command", "says"),
    [
        ("worker status", "worker-1-"),
        ("worker health worker-1", "canary_s"),
        ("worker pause worker-1", ""),
        ("worker resume worker-1", ""),
        ("router status", "router-1-"),
        ("streams status", "HR_REQ"),
        ("streams plan", "nothing to do"),
        ("dlq ls", "no dead letters"),
        ("model ls", "sim"),
        ("replay index --model sim", "worker-1-"),
        ("keys ls", ""),
        ("jobs ls", ""),
        ("doctor", "every consumer of placed work has a live worker"),
        ("top --once", "worker-1-"),
    ],
)
def test_commands_of_an_operator_log_in_by_themselves(up: RunningUp, command: str, says: str) -> None:
    assert says in headrace(up, *command.split())
    assert not violations(up)


async def test_a_client_of_the_data_folder_submits_jobs(up: RunningUp) -> None:
    async with connect(options=ClientOptions(data_dir=folder_of(up) / ".headrace", tenant="acme")) as client:
        job = await client.submit({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4})
        assert (await job.result(timeout_s=TIMEOUT_S)).ok
    assert not violations(up)


async def test_the_address_alone_is_enough_beside_the_data_folder(up: RunningUp, monkeypatch: pytest.MonkeyPatch) -> None:
    """A client, a command, and a worker of a model that `up` does not serve."""
    url = up.state()["nats"]["url"]
    monkeypatch.delenv("HEADRACE_DATA_DIR", raising=False)
    monkeypatch.chdir(folder_of(up))
    async with connect(url) as client:
        assert await client.only_model() == MODEL
    assert "worker-1-" in headrace(up, "worker", "status", "--nats", url)
    command = [sys.executable, "-P", "-m", "headrace", "worker", "--engine", "sim", "--served-name", "other", "--name", "other"]
    with (folder_of(up) / "other.log").open("wb") as log:
        worker = subprocess.Popen([*command, "--nats", url], cwd=folder_of(up), stdout=log, stderr=log)
    try:
        models = f"{up.state()['url']}/v1/models"
        until("the other model", lambda: "other" in {one["id"] for one in httpx.get(models).json()["data"]})
    finally:
        worker.terminate()
        assert worker.wait(TIMEOUT_S) == 0
        headrace(up, "model", "rm", "other")
    assert not violations(up)


def context_of(up: RunningUp, login: str) -> Path:
    return folder_of(up) / ".headrace" / "nats" / "logins" / f"{login}.json"


async def test_a_tenant_submits_jobs_with_its_own_login_and_reads_their_results(up: RunningUp) -> None:
    nats = ConnectOptions.from_context(str(context_of(up, "batch-acme")))
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    async with connect(options=ClientOptions(nats=nats)) as client:
        assert client.tenant == "acme"
        job = await client.submit(body, id="one", priority="std")
        assert (await job.result(timeout_s=TIMEOUT_S)).ok
        again = await client.submit(body, id="one")
        assert again.known
        assert (await again.result(timeout_s=TIMEOUT_S)).text
        answered = [result.ok async for result in client.submit_all([body] * 40, window=16, priority="std")]
        assert answered == [True] * 40
        assert await client.peek("never") is None
        for refused in (client.jobs(), client.cancel("one"), client.only_model()):
            with pytest.raises((NotAllowed, NotSubmitted), match="login of"):
                await refused
    with pytest.raises(NotAllowed, match="cannot speak for 'rival'"):
        async with connect(options=ClientOptions(nats=nats, tenant="rival")):
            pass
    rival = ConnectOptions.from_context(str(context_of(up, "batch-rival")))
    async with connect(options=ClientOptions(nats=rival)) as other:
        assert await other.peek("one") is None
    assert not violations(up)


def test_commands_for_jobs_work_with_the_login_of_a_tenant(up: RunningUp, tmp_path: Path) -> None:
    lines, results = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
    lines.write_text((json.dumps(body) + "\n") * 8)
    login = ("--nats-context", str(context_of(up, "batch-acme")))
    headrace(up, "submit", str(lines), "--out", str(results), "--priority", "std", *login)
    assert len(results.read_text().splitlines()) == 8
    with pytest.raises(AssertionError, match="cannot list jobs"):
        headrace(up, "jobs", "ls", *login)
    with pytest.raises(AssertionError, match="cannot speak for 'rival'"):
        headrace(up, "submit", str(lines), "--out", str(tmp_path / "no.jsonl"), "--tenant", "rival", *login)
    assert not violations(up)


def test_a_stream_survives_the_death_of_its_worker(openai: OpenAI, up: RunningUp) -> None:
    stream = openai.chat.completions.create(
        model=MODEL, messages=[{"role": "user", "content": "Tell me much."}], max_tokens=400, stream=True
    )
    tokens = 0
    for chunk in stream:
        tokens += bool(chunk.choices and chunk.choices[0].delta.content)
        if tokens == 5:
            busy = [line.split()[0] for line in headrace(up, "worker", "status").splitlines() if "worker-" in line]
            assert busy
            for worker in up.state()["workers"][:1]:
                os.kill(worker["pid"], signal.SIGKILL)
    assert tokens > 300
    assert not violations(up)


def test_the_deployment_goes_on_after_a_restart_of_its_server(openai: OpenAI, up: RunningUp) -> None:
    before = up.state()["nats"]["pid"]
    os.kill(before, signal.SIGKILL)
    up.until("another server", lambda: up.state()["nats"]["pid"] not in (None, before))
    up.until("an answer", up.answers, 60)
    assert chat(openai, "After the restart.")
    assert not violations(up)  # its memory streams are gone: parts wait for the operator, who makes them


async def test_a_writer_of_the_bucket_takes_over_no_model_and_runs_no_template(openai: OpenAI, up: RunningUp) -> None:
    """It has all that the server asks for, but not the key: its template would be rendered, or its pool be asked."""
    body: Any = [{"role": "user", "content": "Say hello."}]
    before = openai.chat.completions.create(model=MODEL, messages=body, max_tokens=4).usage
    template = b"{% for m in messages %}" + b"stolen " * 500 + b"{{ m.content }}{% endfor %}"
    operator = ConnectOptions.from_context(str(context_of(up, "operator")))
    async with await Connection.connect(operator, subjects=Subjects()) as connection:
        cards = connection.bucket("hr_models")
        (entry,) = await cards.entries(">")
        card = decode(ModelCard, entry.value)
        assert card.signature
        digest = hashlib.sha256(template).hexdigest()
        found = CardFile(object=digest, digest=digest, size=len(template))
        await connection.objects("hr_models").put(digest, template)
        changed = msgspec.structs.replace(card, files={**card.files, "chat_template.jinja": found})
        await cards.put(entry.key, encode(changed))
        for number, signature in enumerate((b"", b"x" * 32, card.signature)):
            other = f"stolen-{number}"
            forged = msgspec.structs.replace(changed, model=other, aliases=[], pool=other, signature=signature)
            await cards.put(other, encode(forged))
        up.until("what the frontend says of all", lambda: len(up.events("card.forged")) >= 4, 30)
        after = openai.chat.completions.create(model=MODEL, messages=body, max_tokens=4).usage
        assert before is not None
        assert after is not None
        assert after.prompt_tokens == before.prompt_tokens
        assert [model.id for model in openai.models.list()] == [MODEL]
        async with asyncio.timeout(60):  # a worker's own card, stored again by its keeper or by a worker that starts
            while (stored := await cards.get(entry.key)) is None or decode(ModelCard, stored.value).files != card.files:
                await asyncio.sleep(0.1)
        for number in range(3):
            await cards.delete(f"stolen-{number}")
    assert chat(openai, "And after that.")


def test_the_key_of_cards_is_in_no_context_and_for_its_user_alone(up: RunningUp) -> None:
    folder = folder_of(up) / ".headrace" / "nats" / "logins"
    key = folder / "card.key"
    assert key.stat().st_mode & 0o077 == 0
    secret = key.read_text().strip()
    contexts = {path.name: path.read_text() for path in folder.glob("*.json")}
    assert not [name for name, text in contexts.items() if secret in text]
    named = {name.partition("-")[0].removesuffix(".json") for name, text in contexts.items() if str(key) in text}
    assert named == {"ingress", "worker"}


def own_logins(up: RunningUp) -> dict[str, str]:
    """The context of each worker process, by its name in `up`."""
    found = {}
    for worker in up.state()["workers"]:
        variables = Path(f"/proc/{worker['pid']}/environ").read_bytes().split(b"\0")
        context = next(v for v in variables if v.startswith(b"HEADRACE_NATS_CONTEXT="))
        found[worker["name"]] = context.decode().partition("=")[2]
    return found


async def test_each_start_of_a_worker_has_a_login_of_its_own_that_ends_with_it(up: RunningUp) -> None:
    up.until("both workers", lambda: len(headrace(up, "worker", "status").splitlines()) == 3)
    before = own_logins(up)
    for name, context in before.items():
        worker = json.loads(Path(context).read_text())["headrace_worker"]
        assert worker.startswith(f"{name}-")
        assert worker in headrace(up, "worker", "status")
    options = ConnectOptions.from_context(before["worker-1"])
    async with await Connection.connect(options, subjects=Subjects()):
        pass
    kept = Path(options.nkey_seed or "").read_text()
    victim = next(worker["pid"] for worker in up.state()["workers"] if worker["name"] == "worker-1")
    os.kill(victim, signal.SIGKILL)
    up.until("another process", lambda: all(w["pid"] not in (None, victim) for w in up.state()["workers"]))
    up.until("both workers", lambda: len(headrace(up, "worker", "status").splitlines()) == 3)
    assert own_logins(up)["worker-1"] != before["worker-1"]
    assert not Path(before["worker-1"]).exists()
    copied = folder_of(up) / "copied.nk"
    copied.write_text(kept)
    with pytest.raises(AccessDenied):
        await Connection.connect(replace(options, nkey_seed=str(copied)), subjects=Subjects())


def test_a_worker_drains_as_it_is_told(up: RunningUp) -> None:
    up.until("both workers", lambda: len(headrace(up, "worker", "status").splitlines()) == 3)
    headrace(up, "worker", "drain", "worker-2")


def test_no_part_waits_in_vain_for_what_the_server_would_push(up: RunningUp) -> None:
    assert "watch.silent" not in up.log_file.read_text()


async def test_the_consumer_of_a_workers_requests_has_a_name_that_cannot_be_guessed(up: RunningUp) -> None:
    operator = ConnectOptions.from_context(str(context_of(up, "operator")))
    async with await Connection.connect(operator, subjects=Subjects()) as connection:
        secrets = [name.partition("~")[2] for name in await connection.consumer_subjects("HR_WORK")]
    assert secrets
    assert all(len(secret) == 32 for secret in secrets)
    assert len(set(secrets)) == len(secrets)


async def test_nobody_connects_without_a_login(up: RunningUp) -> None:
    with pytest.raises(AccessDenied, match="asks for a login"):
        await Connection.connect(ConnectOptions(servers=(up.state()["nats"]["url"],)), subjects=Subjects())


def test_no_argument_and_no_environment_of_a_part_has_a_seed(up: RunningUp) -> None:
    folder = folder_of(up) / ".headrace" / "nats" / "logins"
    seeds = {path.read_text().strip().encode() for path in folder.glob("*.nk")}
    assert len(seeds) >= 5
    told: list[bytes] = []

    def read() -> bool:
        told[:] = [Path(f"/proc/{pid}/{what}").read_bytes() for pid in up.pids() for what in ("cmdline", "environ")]
        return True

    up.until("all parts can be read: one that has drained may just be ending", read, 30)
    assert len(told) >= 8
    assert not any(seed in one for one in told for seed in seeds)
    for path in folder.iterdir():
        assert not path.stat().st_mode & 0o077, path
