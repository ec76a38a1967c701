"""No field of OpenAI's APIs is left undecided: docs/http.md says of each what becomes of it, and what it says is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from anthropic.types import message_create_params as message_params
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params
from openai.types.responses import response_create_params as response_params
from structlog.testing import capture_logs

from headrace.frontend.anthropic import schema as messages
from headrace.frontend.chat_schema import HINTS, ChatRequest, CompletionRequest
from headrace.frontend.errors import BadRequest
from headrace.frontend.http.bodies import MOST_NAMES, ReportingDecoder, decode_body
from headrace.frontend.responses import schema as responses
from tests.support.frontend.fakes import MODEL, FakeIngress, chat, frontend, post

ROWS = [
    line.split("|")[1:3]
    for line in (Path(__file__).parents[4] / "docs" / "http.md").read_text().split("\n### Messages")[0].splitlines()
    if line.startswith("| `")
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
    """What the table says of a field."""
    said = [what for names, what in ROWS if f"`{name}`" in names or f"`{name}." in names]
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
