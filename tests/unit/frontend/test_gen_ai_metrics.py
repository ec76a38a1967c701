"""Generating requests are observed under OpenTelemetry's names, each once, when they have ended."""

from __future__ import annotations

import pytest
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics as conventions

from headrace.broker.errors import Overloaded
from headrace.frontend import gen_ai_metrics as module
from headrace.frontend.metrics import Metrics
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, frontend, say

NAMES = {
    conventions.GEN_AI_SERVER_REQUEST_DURATION: module.DURATION_S,
    conventions.GEN_AI_SERVER_TIME_TO_FIRST_TOKEN: module.FIRST_TOKEN_S,
    conventions.GEN_AI_SERVER_TIME_PER_OUTPUT_TOKEN: module.OUTPUT_TOKEN_S,
}
ANSWERED = {"gen_ai_operation_name": "chat", "gen_ai_provider_name": "headrace", "gen_ai_request_model": MODEL}


async def observed(ingress: FakeIngress, path: str = "/v1/chat/completions", **body: object) -> dict[tuple[str, str], float]:
    """By histogram and error, how many were observed; every one has the labels of a chat."""
    built = frontend(ingress)
    asked = {"model": "tiny", "stream": True, "messages": [{"role": "user", "content": "hi"}], **body}
    await Call(built.app, path, asked).run()
    found = {}
    for family in built.metrics.registry.collect():
        for sample in family.samples:
            if sample.name.startswith("gen_ai_") and sample.name.endswith("_count"):
                labels = dict(sample.labels)
                code = labels.pop("error_type", "")
                assert labels == ANSWERED
                found[family.name, code] = sample.value
    return found


def test_names_are_those_of_the_conventions_as_prometheus_spells_them() -> None:
    shown = {family.name for family in Metrics().registry.collect() if family.name.startswith("gen_ai_")}
    assert shown == {f"{name.replace('.', '_')}_seconds" for name in NAMES}
    assert module.DURATION_S[0] == 0.01
    assert module.DURATION_S[-1] == 81.92
    assert len(module.DURATION_S) == 14


@pytest.mark.parametrize("stream", [True, False])
async def test_an_answer_is_observed_once_in_each(stream: bool) -> None:
    found = await observed(FakeIngress(say("a", "b", "c")), stream=stream)
    assert found == {(f"{name.replace('.', '_')}_seconds", ""): 1.0 for name in NAMES}


async def test_an_answer_of_one_token_has_no_time_per_token() -> None:
    found = await observed(FakeIngress(say("a")))
    assert found["gen_ai_server_time_to_first_token_seconds", ""] == 1.0
    assert found["gen_ai_server_time_per_output_token_seconds", ""] == 0.0


async def test_a_request_that_fails_is_observed_by_its_error_and_in_no_time_of_tokens() -> None:
    ingress = FakeIngress()
    ingress.refusal = Overloaded("full")
    found = await observed(ingress)
    assert list(found.values()) == [1.0]
    ((name, code),) = found
    assert name == "gen_ai_server_request_duration_seconds"
    assert code != ""


async def test_a_request_for_an_unknown_model_makes_no_series() -> None:
    assert await observed(FakeIngress(), model="nobody") == {}
