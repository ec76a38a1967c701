"""OpenAI's own published examples against our server, and its answers against OpenAI's published schemas.

The schemas are taken as they are, but for two places where the specification contradicts itself. The events of a streamed
completion have the schema of a whole answer, in which `finish_reason` must be one of three words, while the specification's own
example of such an event has null there, as OpenAI's server and vLLM's send it until the last one (`OWN_EVENT`). And the `usage`
of a response must be an object, while it may be null to OpenAI's own client, and the Open Responses specification wants null
until the response has ended (`OWN_RESPONSE`).
"""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import jsonschema_rs
import pytest
from openai.types.responses import Response

from tests.support.up_process import RunningUp

pytestmark = pytest.mark.deployment


def _nullable(schema: Any) -> Any:
    """The schema with what OpenAPI called `nullable` before it took JSON Schema as it is."""
    if isinstance(schema, list):
        return [_nullable(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    plain = {key: _nullable(value) for key, value in schema.items()}
    return {"anyOf": [plain, {"type": "null"}]} if plain.pop("nullable", False) is True else plain


def published() -> dict[str, Any]:
    """The schemas, and `CompletionEvent`: a completion that may have no reason to end yet. A response may have no usage yet."""
    schemas: dict[str, Any] = _nullable(SPEC["schemas"])
    event = copy.deepcopy(schemas["CreateCompletionResponse"])
    choice = event["properties"]["choices"]["items"]["properties"]
    choice["finish_reason"] = {"anyOf": [choice["finish_reason"], {"type": "null"}]}
    response = copy.deepcopy(schemas["Response"])
    own = response["allOf"][-1]["properties"]
    own["usage"] = {"anyOf": [own["usage"], {"type": "null"}]}
    return {**schemas, "CompletionEvent": event, "Response": response, "StrictResponse": schemas["Response"]}


SPEC = json.loads((Path(__file__).parent / "openai_spec" / "answers.json").read_text())
SCHEMAS = published()
EXAMPLES = [(path, title) for path, examples in SPEC["examples"].items() for title in examples]
ANSWERS = {
    "/chat/completions": ("CreateChatCompletionResponse", "CreateChatCompletionStreamResponse"),
    "/completions": ("CreateCompletionResponse", "CompletionEvent"),
    "/embeddings": ("CreateEmbeddingResponse", ""),
    "/responses": ("Response", "ResponseStreamEvent"),
}
REFUSED = {  # what the server does not do, by the parameter that its answer names
    ("/responses", "File input"): "input[0].content[1].type",
}
IMAGE = "data:image/png;base64," + base64.b64encode(b"\x89PNG\r\n\x1a\n" + bytes(100)).decode()


def problems(schema: str, document: Any) -> list[str]:
    """What OpenAI's schema of this name says is wrong with the document."""
    root = {"$ref": f"#/components/schemas/{schema}", "components": {"schemas": SCHEMAS}}
    validator = jsonschema_rs.Draft202012Validator(root)
    return [f"{'.'.join(map(str, error.instance_path))}: {error.message[:300]}" for error in validator.iter_errors(document)]


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Base URLs by what is served there: `text` and `vectors`."""
    ups = {
        "text": RunningUp(tmp_path_factory.mktemp("text"), "--served-name", "m", "--tool-parser", "hermes"),
        "vectors": RunningUp(tmp_path_factory.mktemp("vectors"), "--served-name", "m", "--engine-arg", "pooling=embed"),
    }
    try:
        for up in ups.values():
            up.until_ready()
        yield {name: up.state()["url"] for name, up in ups.items()}
    finally:
        for up in ups.values():
            up.stop()


def local(value: Any) -> Any:
    """The example with pictures that are there without a network."""
    if isinstance(value, list):
        return [local(item) for item in value]
    if isinstance(value, dict):
        return {key: local(item) for key, item in value.items()}
    return IMAGE if isinstance(value, str) and value.startswith("https://upload.") else value


def ask(urls: dict[str, str], path: str, body: Any) -> httpx.Response:
    base = urls["vectors" if path == "/embeddings" else "text"]
    return httpx.post(f"{base}/v1{path}", json=body, timeout=30)


@pytest.mark.parametrize(("path", "title"), EXAMPLES)
def test_published_examples_are_answered_as_published(urls: dict[str, str], path: str, title: str) -> None:
    example = SPEC["examples"][path][title]
    limit = {"/responses": "max_output_tokens", "/embeddings": None}.get(path, "max_tokens")
    body = local(example) | {"model": "m"} | ({limit: 20} if limit and limit not in example else {})
    answer = ask(urls, path, body)
    if (refused := REFUSED.get((path, title))) is not None:
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, refused), answer.text
        return
    assert answer.status_code == 200, answer.text
    whole, streamed = ANSWERS[path]
    if not example.get("stream"):
        assert problems(whole, answer.json()) == []
        return
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert len(events) > 2
    assert [found for event in events for found in problems(streamed, event)] == []


def test_lists_of_models_are_as_published(urls: dict[str, str]) -> None:
    assert problems("ListModelsResponse", httpx.get(f"{urls['text']}/v1/models").json()) == []
    assert problems("Model", httpx.get(f"{urls['text']}/v1/models/m").json()) == []


@pytest.mark.parametrize(
    "more",
    [
        {"n": 2, "logprobs": True, "top_logprobs": 3},
        {"stream": True, "stream_options": {"include_usage": True}},
        {"stream": True, "logprobs": True, "top_logprobs": 1, "n": 2},
        {"response_format": {"type": "json_object"}},
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
            "tool_choice": "required",
        },
        {
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}],
            "tool_choice": "required",
            "stream": True,
        },
    ],
)
def test_options_of_chat_keep_to_the_published_schema(urls: dict[str, str], more: dict[str, Any]) -> None:
    body = {"model": "m", "messages": [{"role": "user", "content": "Hello!"}], "max_tokens": 30, **more}
    answer = ask(urls, "/chat/completions", body)
    assert answer.status_code == 200, answer.text
    whole, streamed = ANSWERS["/chat/completions"]
    if "stream" not in more:
        assert problems(whole, answer.json()) == []
        return
    events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [found for event in events for found in problems(streamed, event)] == []


OWN_EVENT = {
    "id": "cmpl-7iA7iJjj8V2zOkCGvWF2hAkDWBQZe",
    "object": "text_completion",
    "created": 1690759702,
    "choices": [{"text": "This", "index": 0, "logprobs": None, "finish_reason": None}],
    "model": "gpt-3.5-turbo-instruct",
}


OWN_RESPONSE = {  # one that has just begun
    "id": "resp_1",
    "object": "response",
    "created_at": 1741290958,
    "status": "in_progress",
    "error": None,
    "incomplete_details": None,
    "instructions": None,
    "model": "m",
    "output": [],
    "parallel_tool_calls": True,
    "temperature": 1.0,
    "tool_choice": "auto",
    "tools": [],
    "top_p": 1.0,
    "usage": None,
    "metadata": {},
}


def test_the_other_place_is_still_there() -> None:
    assert [found.partition(":")[0] for found in problems("StrictResponse", OWN_RESPONSE)] == ["usage"]
    assert problems("Response", OWN_RESPONSE) == []
    assert Response.model_validate(OWN_RESPONSE).usage is None


def test_the_one_place_where_the_specification_contradicts_itself_is_still_there() -> None:
    assert problems("CreateCompletionResponse", OWN_EVENT) != []
    assert problems("CompletionEvent", OWN_EVENT) == []


def test_a_schema_notices_what_is_wrong() -> None:
    assert problems("Model", {"id": "m", "object": "model", "created": "now", "owned_by": "us"}) != []
