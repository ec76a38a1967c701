"""No field of OpenAI's APIs is left undecided: docs/http.md says of each what becomes of it, and what it says is so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from openai.types import completion_create_params as completion_params
from openai.types.chat import completion_create_params as chat_params

from headrace.frontend.chat_schema import ChatRequest, CompletionRequest
from tests.support.frontend.fakes import MODEL, FakeIngress, chat, frontend, post

ROWS = [
    line.split("|")[1:3]
    for line in (Path(__file__).parents[4] / "docs" / "http.md").read_text().split("\n### Messages")[0].splitlines()
    if line.startswith("| `")
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
    {"anything_else": {"at": ["all"]}},
]


@pytest.mark.parametrize("change", IGNORED, ids=lambda change: str(next(iter(change))))
async def test_what_is_said_to_be_ignored_changes_nothing(change: dict[str, Any]) -> None:
    plain, changed = FakeIngress(), FakeIngress()
    for ingress, body in ((plain, chat()), (changed, chat(**change))):
        assert (await post(frontend(ingress).app, body)).status == 200
    assert changed.jobs[0].generation == plain.jobs[0].generation
    assert changed.jobs[0].card.model == MODEL
