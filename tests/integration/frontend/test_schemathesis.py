"""Requests made up from our own `/openapi.json`, sent to a whole deployment: no 5xx, and every answer as the document says."""

from __future__ import annotations

from collections.abc import Iterator
from random import Random
from typing import Any

import msgspec
import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import not_a_server_error
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from headrace.frontend.openapi import build_openapi
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.deployment

EXAMPLES = 20  # per route
MODEL = "sim"
ENGINES = {
    "text": (),
    "embed": ("--engine-arg", "pooling=embed"),
    "score": ("--engine-arg", "pooling=score"),
    "classify": ("--engine-arg", "pooling=classify"),
}
KINDS = {"embed": "embed", "pooling": "embed", "score": "score", "rerank": "score", "classify": "classify"}
SENSIBLE = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "Where does the water go?"}],
    "prompt": "Once upon a time",
    "input": "Where does the water go?",
    "token_ids": [300, 301, 302],
}
SHORT = {"max_tokens": 8, "max_completion_tokens": 8, "max_output_tokens": 16, "min_tokens": 0}  # or answers fill the context

CHECKS = [
    not_a_server_error,
    status_code_conformance,
    content_type_conformance,
    response_headers_conformance,
    response_schema_conformance,
]


SCHEMA = schemathesis.openapi.from_dict(msgspec.json.decode(build_openapi()))
OPERATIONS = {found.ok().label: found.ok() for found in SCHEMA.get_all_operations()}


@pytest.fixture(scope="module")
def urls(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """Base URLs of deployments with engines for these kinds of requests."""
    ups = {
        kind: RunningUp(tmp_path_factory.mktemp(kind), "--served-name", MODEL, "--engine-arg", "context_length=2048", *flags)
        for kind, flags in ENGINES.items()
    }
    try:
        for up in ups.values():
            up.until_ready()
        yield {kind: up.state()["url"] for kind, up in ups.items()}
    finally:
        for up in ups.values():
            up.stop()


def whole(value: Any) -> Any:
    """With 1 in place of 1.0: JSON Schema takes these for the same, and bodies full of them would all end in the same error."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, list):
        return [whole(item) for item in value]
    return {key: whole(item) for key, item in value.items()} if isinstance(value, dict) else value


def tame(case: Any, kept: float) -> None:
    """What was made up, with a model that is there, with contents that can be understood, and without most of the options."""
    if "model" in (case.path_parameters or {}):
        case.path_parameters["model"] = MODEL
    if isinstance(case.body, dict) and case.media_type == "application/json":
        random = Random(repr(sorted(case.body)))
        optional = {key: whole(value) for key, value in case.body.items() if random.random() < kept}
        given_as = case.body.keys() & {"messages", "input", "token_ids"} or {"prompt"}
        case.body = {**optional, **{key: SENSIBLE[key] for key in ("model", *given_as)}, **SHORT}
        for key in {"options", "sampling_params"} & case.body.keys():  # where other APIs have the limits
            if isinstance(case.body[key], dict):
                case.body[key] |= SHORT | {"num_predict": 8}
        if "token_ids" in given_as:
            case.body.setdefault("sampling_params", SHORT)


@pytest.mark.parametrize("label", OPERATIONS)
def test_every_answer_is_as_the_document_says(label: str, urls: dict[str, str]) -> None:
    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True, database=None)
    @given(case=OPERATIONS[label].as_strategy(), kept=st.sampled_from([0.0, 0.1, 0.2, 0.4, None]))
    def check(case: Any, kept: float | None) -> None:
        if kept is not None:
            tame(case, kept)
        if isinstance(case.body, dict) and isinstance(case.body.get("timeout"), (int, float)):
            case.body["timeout"] = max(case.body["timeout"], 30)  # what cannot be done in time is a 504, and rightly so
        kind = next((kind for word, kind in KINDS.items() if word in label), "text")
        case.call_and_validate(base_url=urls[kind], checks=CHECKS, timeout=20)

    check()
