"""Requests where keys are in force: who is let in, what a key covers, and for whom it speaks."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.broker.keys import CLIENT_SCOPES
from tests.support.frontend.fakes import MODEL, chat
from tests.support.frontend.keyed import Keyed

MESSAGES = {"model": MODEL, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize("key", [None, "", "wrong", "hr_sk_abcdefgh_" + "A" * 43])
async def test_without_a_valid_key_no_request_runs(key: str | None) -> None:
    bed = Keyed(api_key=("right",))
    call = await bed.ask(key)
    assert (call.status, call.headers["www-authenticate"]) == (401, "Bearer")
    assert call.error["code"] == ("missing_api_key" if key is None else "invalid_api_key")
    assert call.received == 0
    assert not bed.ingress.jobs


async def test_a_valid_key_is_let_in_as_openai_and_as_anthropic_send_it() -> None:
    bed = Keyed()
    key = bed.key()
    assert (await bed.ask(key)).status == 200
    assert (await bed.ask(None, x_api_key=key)).status == 200
    assert (await bed.ask(None, "/v1/messages", MESSAGES, x_api_key=key)).status == 200
    assert (await bed.ask(None, authorization=f"bearer {key}")).status == 200
    assert (await bed.ask(None, authorization=f"Basic {key}")).status == 401


async def test_every_api_is_told_in_its_own_shape() -> None:
    bed = Keyed(auth="keys")
    call = await bed.ask(None, "/v1/messages", MESSAGES)
    assert (call.status, call.json()["error"]["type"]) == (401, "authentication_error")
    call = await bed.ask(None, "/api/chat")
    assert (call.status, isinstance(call.json()["error"], str)) == (401, True)
    limited = bed.key(scopes=["models"])
    call = await bed.ask(limited, "/v1/messages", MESSAGES)
    assert (call.status, call.json()["error"]["type"]) == (403, "permission_error")


async def test_probes_need_no_key_and_metrics_only_where_that_is_set() -> None:
    bed = Keyed(auth="keys")
    for path in ("/live", "/ready", "/health", "/ping"):
        assert (await bed.ask(None, path, method="GET")).status == 200
    for path in ("/metrics", "/load", "/v1/models", "/docs", "/", "/no-such"):
        assert (await bed.ask(None, path, method="GET")).status == 401
    assert (await bed.ask(bed.key(), "/metrics", method="GET")).status == 403
    assert (await bed.ask(bed.key(scopes=["metrics"]), "/metrics", method="GET")).status == 200
    assert (await Keyed(auth="keys", open_metrics=True).ask(None, "/metrics", method="GET")).status == 200


@pytest.mark.parametrize(
    ("scope", "path", "body"),
    [
        ("generate", "/v1/chat/completions", chat()),
        ("generate", "/api/chat", chat()),
        ("embed", "/v1/embeddings", {"model": MODEL, "input": "x"}),
        ("tokens", "/tokenize", {"model": MODEL, "prompt": "x"}),
        ("admin", "/v1/load_lora_adapter", {}),
    ],
)
async def test_a_key_without_the_scope_is_refused(scope: str, path: str, body: Any) -> None:
    bed = Keyed()
    call = await bed.ask(bed.key(scopes=[s for s in CLIENT_SCOPES if s != scope]), path, body)
    assert call.status == 403
    assert f"the scope {scope}" in str(call.json()["error"])
    assert call.received == 0


async def test_a_key_for_some_models_sees_and_uses_only_those() -> None:
    bed = Keyed()
    scopes = [scope for scope in CLIENT_SCOPES if scope != "batches"]
    good, bad = bed.key(models=["org/*"], scopes=scopes), bed.key(models=["other/*"], scopes=scopes)
    assert (await bed.ask(good)).status == 200
    for path, body in (
        ("/v1/chat/completions", chat()),
        ("/v1/completions", {"model": MODEL, "prompt": "x"}),
        ("/v1/responses", {"model": MODEL, "input": "x"}),
        ("/v1/messages", MESSAGES),
        ("/tokenize", {"model": MODEL, "prompt": "x"}),
        ("/api/show", {"model": MODEL}),
        ("/api/chat", {"model": MODEL, "messages": chat()["messages"]}),
        ("/v1/messages/count_tokens", {"model": MODEL, "messages": MESSAGES["messages"]}),
    ):
        call = await bed.ask(bad, path, body)
        assert call.status == 403, path
        assert MODEL in str(call.json()["error"])
    assert not [job for job in bed.ingress.jobs if job.tenant != "acme"]
    assert (await bed.ask(bad, "/v1/models", method="GET")).json()["data"] == []
    assert (await bed.ask(bad, "/v1/models/" + MODEL, method="GET")).status == 403
    assert (await bed.ask(bad, "/api/tags", method="GET")).json()["models"] == []
    assert (await bed.ask(good, "/v1/models", method="GET")).json()["data"][0]["id"] == MODEL


async def test_the_tenant_is_the_keys_and_the_header_only_of_a_key_that_speaks_for_others() -> None:
    bed = Keyed()
    acme, gateway = bed.key("acme"), bed.key("gate", scopes=["generate", "act_as"])
    await bed.ask(acme)
    await bed.ask(acme, x_headrace_tenant="acme")
    call = await bed.ask(acme, x_headrace_tenant="victim")
    assert (call.status, call.error["code"]) == (403, "tenant_not_allowed")
    await bed.ask(gateway, x_headrace_tenant="victim")
    await bed.ask(gateway)
    assert [job.tenant for job in bed.ingress.jobs] == ["acme", "acme", "victim", "gate"]


@pytest.mark.parametrize(
    ("body", "headers"),
    [
        (chat(service_tier="priority"), {}),
        (chat(priority=5), {}),
        (chat(), {"x_headrace_worker": "w1"}),
        (chat(), {"x_headrace_explain": "1"}),
        (chat(), {"x_headrace_require_labels": "gpu"}),
    ],
)
async def test_going_first_and_choosing_workers_are_rights(body: Any, headers: dict[str, str]) -> None:
    bed = Keyed()
    assert (await bed.ask(bed.key(), body=body, **headers)).status == 403
    assert (await bed.ask(bed.key(scopes=["generate", "priority", "direct"]), body=body, **headers)).status == 200


async def test_a_valid_key_vouches_for_host_and_origin() -> None:
    bed = Keyed()
    key = bed.key()
    assert (await bed.ask(key, host="llm.example", origin="https://app.example")).status == 200
    assert (await bed.ask("wrong", host="llm.example")).status == 401


async def test_a_stored_key_comes_into_force_while_the_server_runs() -> None:
    bed = Keyed()
    assert (await bed.ask(None)).status == 200
    key = bed.key()
    assert (await bed.ask(None)).status == 401
    assert (await bed.ask(key)).status == 200


async def test_the_log_names_the_key_and_never_its_secret(capsys: pytest.CaptureFixture[str]) -> None:
    bed = Keyed()
    key = bed.key()
    await bed.ask(key)
    await bed.ask(key[:-1] + ("A" if key[-1] != "A" else "B"))
    shown = capsys.readouterr().out
    assert key.split("_")[2] in shown
    assert key.split("_", 3)[3][:20] not in shown
