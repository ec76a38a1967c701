"""No field of OpenAI's APIs is left undecided: docs/http.md says of each what becomes of it, and what it says is so."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import message_create_params as message_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from structlog.testing import capture_logs

from headrace.frontend.admin import LOAD, UNLOAD
from headrace.frontend.anthropic import schema as messages
from headrace.frontend.chat_schema import HINTS, ChatRequest, CompletionRequest
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.bodies import MOST_NAMES, ReportingDecoder, decode_body
from headrace.frontend.openapi import build_openapi
from headrace.frontend.responses import schema as responses
from tests.support.frontend.fakes import MODEL, FakeIngress, chat, frontend, post
from tests.support.frontend.responses_store import MemoryRecords, MemoryStore
from tests.support.frontend.stored_jobs import MemoryJobs

ITEMS = [
    " ".join(item.split()).partition(": ")[::2]
    for item in (Path(__file__).parents[4] / "docs" / "http.md").read_text().split("\n### Messages")[0].split("\n* ")
]

KNOWN: list[tuple[Any, Any, tuple[str, ...]]] = [
    (chat_params.CompletionCreateParamsBase, ChatRequest, HINTS),
    (completion_params.CompletionCreateParamsBase, CompletionRequest, HINTS),
    (response_params.ResponseCreateParamsBase, responses.ResponsesRequest, responses.HINTS),
    (message_params.MessageCreateParamsBase, messages.MessagesRequest, messages.HINTS),
]

OPENAI = {
    "chat": (chat_params.CompletionCreateParamsBase.__annotations__, ChatRequest),
    "completions": (completion_params.CompletionCreateParamsBase.__annotations__, CompletionRequest),
}


def decided(name: str) -> str:
    """What the list says of a field."""
    said = [what for names, what in ITEMS if f"`{name}`" in names or f"`{name}." in names]
    assert said, f"docs/http.md does not say what becomes of {name}"
    return said[0]


@pytest.mark.parametrize("api", OPENAI)
def test_every_field_of_openais_is_decided(api: str) -> None:
    names, request = OPENAI[api]
    for name in names:
        # what is neither ignored nor refused has a type of its own, so that a wrong value is a 400
        assert name in request.__struct_fields__ or "ignored" in decided(name) or "refused" in decided(name), name
        decided(name)


REFUSED: list[dict[str, Any]] = [
    {"functions": []},
    {"function_call": "none"},
    {"chat_template": "x"},
    {"audio": {}},
    {"web_search_options": {}},
    {"use_beam_search": True},
    {"watermarking": True},
    {"logprob_token_ids": [1]},
    {"repetition_detection": {"a": 1}},
    {"kv_transfer_params": {"a": 1}},
    {"ec_transfer_params": {"a": 1}},
    {"mm_processor_kwargs": {"a": 1}},
    {"media_io_kwargs": {"a": 1}},
    {"spaces_between_special_tokens": False},
    {"truncation_side": "right"},
]


@pytest.mark.parametrize("change", REFUSED, ids=lambda change: str(next(iter(change))))
async def test_what_is_said_to_be_refused_is(change: dict[str, Any]) -> None:
    (name,) = change
    call = await post(frontend(FakeIngress()).app, chat(**change))
    assert (call.status, call.error["param"], call.error["code"]) == (400, name, "unsupported_parameter")


IGNORED: list[dict[str, Any]] = [
    {"user": "u"},
    {"metadata": {"a": "b"}},
    {"store": True},
    {"prediction": {}},
    {"verbosity": "low"},
    {"safety_identifier": "s"},
    {"moderation": {}},
    {"prompt_cache_key": "k"},
    {"stream_interval": 3},
    {"length_penalty": 2.0},
    {"return_token_offsets": True},
    {"mm_payload": "none"},
]


@pytest.mark.parametrize("change", IGNORED, ids=lambda change: str(next(iter(change))))
async def test_what_is_said_to_be_ignored_changes_nothing(change: dict[str, Any]) -> None:
    plain, changed = FakeIngress(), FakeIngress()
    with capture_logs() as logs:
        for ingress, body in ((plain, chat()), (changed, chat(**change))):
            assert (await post(frontend(ingress).app, body)).status == 200
    assert [line["event"] for line in logs if line["event"] == "request.fields_ignored"] == []  # it is known
    assert changed.jobs[0].generation == plain.jobs[0].generation
    assert changed.jobs[0].card.model == MODEL


@pytest.mark.parametrize(("params", "request_", "hints"), KNOWN, ids=lambda value: getattr(value, "__name__", ""))
def test_every_field_of_an_api_has_a_type_or_is_a_hint(params: Any, request_: Any, hints: tuple[str, ...]) -> None:
    assert set(params.__annotations__) - set(request_.__struct_fields__) - set(hints) == set()
    assert set(request_.__struct_fields__) & set(hints) == set()


class Wish(msgspec.Struct, kw_only=True):
    model: str
    inner: dict[str, Any] | None = None


def ignored(decoder: ReportingDecoder[Wish], **fields: Any) -> list[str]:
    """What is reported of a request."""
    with capture_logs() as logs:
        wish = decode_body(decoder, msgspec.json.encode({**fields, "model": "a"}))
    assert (wish.model, wish.inner) == ("a", fields.get("inner"))
    return [name for line in logs for name in line["fields"]]


def test_a_field_that_no_api_has_is_ignored_and_reported_once() -> None:
    decoder = ReportingDecoder(Wish, ("hint",))
    assert ignored(decoder, inner={"b": 1}, hint={"c": 2}) == []
    assert ignored(decoder, zeta=1, hint=1, beta={"c": 2}) == ["beta", "zeta"]
    assert ignored(decoder, zeta=1, gamma=None) == ["gamma"]
    assert ignored(decoder, zeta=1) == []
    many = {f"{number:03}{'x' * 100}": 0 for number in range(2 * MOST_NAMES)}
    names = ignored(decoder, **many)
    assert {len(name) for name in names} == {64}
    assert len(names) == MOST_NAMES - 3
    assert ignored(decoder, one_more=1) == []


def test_such_a_field_hides_no_error_of_another() -> None:
    with pytest.raises(BadRequest, match="model: expected `str`"):
        decode_body(ReportingDecoder(Wish), b'{"zeta": 1, "model": 3}')
    with pytest.raises(BadRequest, match="missing required parameter: model"):
        decode_body(ReportingDecoder(Wish), b'{"zeta": 1}')


async def test_a_request_with_such_a_field_is_answered() -> None:
    ingress = FakeIngress()
    with capture_logs() as logs:
        assert (await post(frontend(ingress).app, chat(of_no_api={"at": ["all"]}))).status == 200
    assert [line["fields"] for line in logs if line["event"] == "request.fields_ignored"] == [["of_no_api"]]


CHAT: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}]}
FORM = {"content-type": "multipart/form-data; boundary=b"}

BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": CHAT,
    "/v1/chat/completions/{completion_id}": {"metadata": {}},
    "/v1/completions": {"prompt": "hi"},
    "/v1/responses": {"input": "hi"},
    "/v1/responses/input_tokens": {"input": "hi"},
    "/v1/responses/compact": {"model": MODEL, "input": "hi"},
    "/v1/conversations": {},
    "/v1/conversations/{conversation_id}": {"metadata": {}},
    "/v1/conversations/{conversation_id}/items": {"items": [{"role": "user", "content": "hi"}]},
    "/v1/messages": {**CHAT, "max_tokens": 5},
    "/v1/messages/count_tokens": CHAT,
    "/v1/embeddings": {"input": "hi"},
    "/v1/classify": {"input": "hi"},
    "/v1/pooling": {"input": "hi"},
    "/v1/score": {"text_1": "a", "text_2": "b"},
    "/v1/rerank": {"query": "a", "documents": ["b"]},
    "/v1/images/generations": {"prompt": "hi"},
    "/v1/videos": {"prompt": "hi"},
    "/v1/tokenize": {"prompt": "hi"},
    "/v1/detokenize": {"tokens": [65]},
    "/inference/v1/generate": {"token_ids": [65], "sampling_params": {}},
    "/api/chat": CHAT,
    "/api/generate": {"model": MODEL, "prompt": "hi"},
    "/api/embed": {"model": MODEL, "input": "hi"},
    "/api/embeddings": {"model": MODEL, "prompt": "hi"},
    "/api/show": {"model": MODEL},
    "/v1/uploads": {"filename": "a.jsonl", "purpose": "batch", "bytes": 1, "mime_type": "application/jsonl"},
    "/v1/uploads/{id}/complete": {"part_ids": ["part-1"]},
    "/v1/batches": {"endpoint": "/v1/embeddings", "input_file_id": "file-1", "completion_window": "24h"},
    LOAD: {"lora_name": "a", "lora_path": "/a"},
    UNLOAD: {"lora_name": "a"},
}
SAME = {
    **{path: f"/v1{path}" for path in ("/score", "/rerank", "/classify", "/pooling", "/tokenize", "/detokenize")},
    "/v2/rerank": "/v1/rerank",
}

PARTS: dict[str, dict[str, Any]] = {
    "options.num_none": {"path": "/api/chat", **CHAT, "options": {"num_none": 4096, "top_k": 3}},
    "sampling_params.n_best": {"path": "/inference/v1/generate", "token_ids": [65], "sampling_params": {"n_best": 1}},
    "output_config.format.draft": {
        "path": "/v1/messages",
        **CHAT,
        "max_tokens": 5,
        "output_config": {"format": {"schema": {"type": "object"}, "draft": 7}},
    },
    "text.voice": {"path": "/v1/responses", "input": "hi", "text": {"verbosity": "low", "voice": "alto"}},
}
"""Fields of parts of a request, and a request that has one."""


class NoLoader:
    """Loads no adapter."""

    async def load(self, pool: str, name: str, source: str) -> list[Any]:
        return []

    async def unload(self, pool: str, name: str) -> list[Any]:
        return []


async def ignored_by(path: str, body: Any, **headers: str) -> list[list[str]]:
    stores: dict[str, Any] = {"responses": MemoryStore(), "records": MemoryRecords(), "jobs": MemoryJobs()}
    served = frontend(FakeIngress(), **stores, adapters=NoLoader(), adapter_routes=True)
    with capture_logs() as logs:
        await post(served.app, body, path, headers=headers)
    return [line["fields"] for line in logs if line["event"] == "request.fields_ignored"]


def test_every_route_with_a_json_body_is_tried() -> None:
    taken = {
        path
        for path, item in json.loads(build_openapi())["paths"].items()
        if "application/json" in item.get("post", {}).get("requestBody", {}).get("content", {})
    }
    assert taken | {LOAD, UNLOAD} == BODIES.keys() | SAME.keys()


@pytest.mark.parametrize("path", [*BODIES, *SAME])
async def test_no_route_ignores_a_field_in_silence(path: str) -> None:
    body, name = BODIES[SAME.get(path, path)], f"of_no_api{path}"
    assert await ignored_by(re.sub(r"{\w+}", "x", path), {**body, name: {"at": "all"}}) == [[name]]


@pytest.mark.parametrize("name", PARTS)
async def test_nor_does_a_part_of_a_request(name: str) -> None:
    body = dict(PARTS[name])
    assert await ignored_by(body.pop("path"), body) == [[name]]


FORMS = [("/v1/videos", ("prompt",)), ("/v1/files", ("purpose", "file")), ("/v1/audio/transcriptions", ("file",))]


@pytest.mark.parametrize(("path", "fields"), FORMS)
async def test_nor_does_a_form(path: str, fields: Sequence[str]) -> None:
    values = {"prompt": "hi", "purpose": "user_data", "of_no_form": "1", "file": "content"}
    parts = "".join(
        f'--b\r\nContent-Disposition: form-data; name="{name}"{"; filename=a" * (name == "file")}\r\n\r\n{values[name]}\r\n'
        for name in ("of_no_form", *fields)
    )
    assert await ignored_by(path, f"{parts}--b--\r\n".encode(), **FORM) == [["of_no_form"]]
