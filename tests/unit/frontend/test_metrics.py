"""Generating requests are observed under OpenTelemetry's names, each once, when they have ended."""

from __future__ import annotations

import pytest
from opentelemetry.semconv._incubating.metrics import gen_ai_metrics as conventions
from prometheus_client import CollectorRegistry

from headrace.broker.errors import Overloaded
from headrace.broker.keys import CLIENT_SCOPES
from headrace.broker.metrics import OTHER
from headrace.frontend import metrics as module
from headrace.frontend.metrics import Metrics, TenantMetrics
from tests.support.frontend.fakes import MODEL, Call, FakeIngress, frontend, say
from tests.support.frontend.keyed import Keyed

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


async def test_a_request_that_fails_is_observed_by_its_error_and_in_no_time_of_tokens() -> None:
    ingress = FakeIngress()
    ingress.refusal = Overloaded("full")
    found = await observed(ingress)
    assert list(found.values()) == [1.0]
    ((name, code),) = found
    assert name == "gen_ai_server_request_duration_seconds"
    assert code != ""


PREFIX = "headrace_frontend_tenant_"


def value(bed: Keyed, name: str, tenant: str, **more: str) -> float | None:
    return bed.frontend.metrics.registry.get_sample_value(f"{PREFIX}{name}", {"tenant": tenant, **more})


def tenants_of(bed: Keyed) -> set[str]:
    found = bed.frontend.metrics.registry.collect()
    return {sample.labels["tenant"] for one in found if one.name.startswith(PREFIX) for sample in one.samples}


async def test_requests_tokens_and_times_are_counted_for_the_tenant_of_the_key() -> None:
    bed = Keyed(say("a", "b"))
    key = bed.key("acme")
    for _ in range(2):
        assert (await bed.ask(key)).status == 200
    assert (await bed.ask(key, body={"model": "none"})).status >= 400
    assert value(bed, "requests_total", "acme", status="2xx") == 2
    assert value(bed, "requests_total", "acme", status="4xx") == 1
    all_prompts = bed.frontend.metrics.registry.get_sample_value(
        "headrace_frontend_prompt_tokens_total", {"model": "sim/test", "source": "request"}
    )
    assert value(bed, "prompt_tokens_total", "acme") == all_prompts or all_prompts is None
    assert (value(bed, "prompt_tokens_total", "acme") or 0) > 0
    assert value(bed, "output_tokens_total", "acme") == 4
    assert value(bed, "first_tokens_total", "acme") == 2
    assert (value(bed, "first_token_seconds_total", "acme") or 0) > 0
    assert value(bed, "quota_refusals_total", "acme") == 0


async def test_a_name_of_a_header_is_no_label_unless_a_key_has_that_tenant() -> None:
    bed = Keyed()
    gateway = bed.key("gateway", scopes=[*CLIENT_SCOPES, "act_as"])
    bed.key("acme")
    for tenant in ("acme", "made-up", "another"):
        assert (await bed.ask(gateway, x_headrace_tenant=tenant)).status == 200
    assert (await bed.ask("hr-no-such-key", x_headrace_tenant="stranger")).status == 401
    assert tenants_of(bed) == {"acme", OTHER}
    assert value(bed, "requests_total", OTHER, status="2xx") == 2


async def test_tokens_of_stored_jobs_count_for_tenants_of_keys_only() -> None:
    bed = Keyed()
    bed.key("acme")
    charge = bed.frontend.renderer._charge
    assert charge is not None
    charge("acme", 30, 12)
    charge("published-by-anybody", 5, 5)
    assert (value(bed, "prompt_tokens_total", "acme"), value(bed, "output_tokens_total", "acme")) == (30, 12)
    assert tenants_of(bed) == {"acme", OTHER}


def test_ten_thousand_tenants_of_keys_have_no_more_series_than_the_setting_says() -> None:
    registry = CollectorRegistry()
    metrics = TenantMetrics(registry)
    metrics.hold(100, lambda _tenant: True)
    for number in range(10_000):
        series = metrics.of(f"tenant-{number}", own=True)
        for status in (200, 429, 500, 0):
            series.answered(status)
        series.used(1, 2)
    labels = {sample.labels["tenant"] for one in registry.collect() for sample in one.samples}
    assert labels == {f"tenant-{number}" for number in range(100)} | {OTHER}
    assert registry.get_sample_value(f"{PREFIX}requests_total", {"tenant": OTHER, "status": "2xx"}) == 9900
    assert metrics.of("tenant-5", own=False).tenant == "tenant-5"
