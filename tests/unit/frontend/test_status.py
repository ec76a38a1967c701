"""What is served, what is up, and what is counted."""

from __future__ import annotations

import asyncio
import logging
from importlib import metadata
from typing import Any

import msgspec
import pytest
import structlog
from prometheus_client.openmetrics.parser import text_string_to_metric_families

from headrace.broker import metrics as broker_metrics
from headrace.broker.ingress.timeline import RequestTimeline
from headrace.broker.jobs import Job
from headrace.broker.protocol.job_record import NO_READER, JobRecord
from headrace.frontend.generation.endpoint import Lifecycle
from headrace.frontend.metrics import Metrics
from headrace.frontend.request_audit import RequestSummary
from headrace.frontend.status import StartupApp
from tests.support.frontend.fakes import (
    CARD,
    FILES,
    MODEL,
    Call,
    FakeAnswer,
    FakeIngress,
    FakeServed,
    chat,
    end,
    frontend,
    get,
    post,
    row,
    say,
)
from tests.support.timelines import SUBMITTED_S, started


async def test_ready_only_when_a_model_can_answer() -> None:
    ingress = FakeIngress()
    built = frontend(ingress)
    assert (await get(built.app, "/ready")).status == 200
    ingress.models.served[MODEL].workers = 0
    assert (await get(built.app, "/ready")).status == 503
    ingress.models.served[MODEL].workers = 1
    ingress.ready = False
    assert (await get(built.app, "/ready")).status == 503
    ingress.ready = True
    built.lifecycle.draining = True
    assert (await get(built.app, "/ready")).json()["reason"] == "draining"
    assert (await get(built.app, "/live")).status == 200


async def test_health_shows_the_broker_and_the_workers_of_each_model() -> None:
    ingress = FakeIngress()
    built = frontend(ingress)
    call = await get(built.app, "/health")
    assert (call.status, call.json()["status"]) == (200, "healthy")
    assert call.json()["models"] == {MODEL: {"workers": 1, "ready": True, "kinds": ["chat", "completion"]}}
    ingress.ready = False
    call = await get(built.app, "/health")
    assert (call.status, call.json()["broker"]) == (503, {"ready": False, "trouble": ingress.trouble})


async def test_the_version_is_that_of_the_package() -> None:
    assert (await get(frontend(FakeIngress()).app, "/version")).json() == {"version": metadata.version("headrace")}


async def test_the_load_is_what_uses_an_engine_at_the_moment() -> None:
    ingress = FakeIngress(lambda job: [])  # answers nothing until it is told to
    app = frontend(ingress).app
    assert (await get(app, "/load")).json() == {"server_load": 0}
    calls = [Call(app, "/v1/chat/completions", chat(stream=stream)) for stream in (True, False)]
    tasks = [asyncio.create_task(call.run()) for call in calls]
    await calls[0].until(lambda: len(ingress.answers) == 2)
    assert (await get(app, "/load")).json() == {"server_load": 2}
    for answer in ingress.answers:
        answer.push([row("x", fin=end())])
    await asyncio.gather(*tasks)
    assert (await get(app, "/load")).json() == {"server_load": 0}
    await post(app, b"{")
    assert (await get(app, "/load")).json() == {"server_load": 0}


async def test_metrics_show_what_the_job_protocol_counts() -> None:
    broker_metrics.REFUSED.labels("a test").inc()
    text = (await get(frontend(FakeIngress()).app, "/metrics")).body.decode()
    assert 'headrace_ingress_refused_total{reason="a test"} 1.0' in text
    for name in ("headrace_ingress_submitted_total", "headrace_ingress_open_requests", "headrace_broker_lease_lapses_total"):
        assert text.count(f"# TYPE {name} ") == 1
    assert text.count("# TYPE process_cpu_seconds_total") == 1


async def test_a_scraper_that_asks_for_openmetrics_gets_it() -> None:
    built = frontend(FakeIngress())
    await post(built.app, chat(stream=True))
    asked = "application/openmetrics-text;version=1.0.0;q=0.8,text/plain;q=0.5"
    call = await Call(built.app, "/metrics", method="GET", headers={"accept": asked}).run()
    text = call.body.decode()
    assert dict(call.sent[0]["headers"])[b"content-type"].startswith(b"application/openmetrics-text")
    assert text.endswith("# EOF\n")
    families = {family.name: family for family in text_string_to_metric_families(text)}
    (sample,) = [sample for sample in families["headrace_frontend_output_tokens"].samples if sample.name.endswith("_total")]
    assert sample.value == 2.0
    assert families["headrace_frontend_time_to_first_token_seconds"].type == "histogram"
    plain = await Call(built.app, "/metrics", method="GET", headers={"accept": "*/*"}).run()
    assert dict(plain.sent[0]["headers"])[b"content-type"] == b"text/plain; version=0.0.4; charset=utf-8"
    assert "# EOF" not in plain.body.decode()


async def test_openapi_describes_every_route_and_every_parameter() -> None:
    call = await get(frontend(FakeIngress()).app, "/openapi.json")
    document = call.json()
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models", "/health", "/ready", "/metrics"} <= set(document["paths"])
    properties = document["components"]["schemas"]["ChatRequest"]["properties"]
    assert {"messages", "temperature", "max_completion_tokens", "logit_bias"} <= set(properties)
    referenced = {ref for ref in call.body.decode().split('"') if ref.startswith("#/components/schemas/")}
    assert {ref.rsplit("/", 1)[1] for ref in referenced} <= set(document["components"]["schemas"])


async def answered(ingress: FakeIngress, body: Any, **headers: str) -> tuple[Any, dict[str, Any]]:
    with structlog.testing.capture_logs() as logs:
        call = await post(
            frontend(ingress).app, body, headers={name.replace("_", "-"): value for name, value in headers.items()}
        )
    (line,) = [entry for entry in logs if entry["event"] == "request.answered"]
    return call, dict(line)


async def test_a_client_s_id_is_echoed_and_logged_beside_the_id_of_the_job() -> None:
    ingress = FakeIngress()
    call, line = await answered(ingress, chat(), x_request_id="abc-1")
    assert call.headers["x-request-id"] == "abc-1"
    assert (line["client_request_id"], line["status"], line["route"]) == ("abc-1", 200, "/v1/chat/completions")
    assert call.json()["id"] == f"chatcmpl-{line['request_id']}"
    assert (ingress.jobs[0].id, ingress.jobs[0].name) == (line["request_id"], "abc-1")


async def test_the_log_line_of_a_request_tells_its_story() -> None:
    finish = {"prompt_tokens": 9, "completion_tokens": 2, "cached_tokens": 4}
    _, line = await answered(
        FakeIngress(say("Hello", " world", **finish)), chat(service_tier="priority"), x_headrace_tenant="acme"
    )
    assert (line["model"], line["tenant"], line["class"]) == (MODEL, "acme", "hi")
    assert (line["cached_tokens"], line["completion_tokens"]) == (4, 2)
    assert line["prompt_tokens"] >= 9
    assert 0 <= line["ttft_s"] <= line["seconds"]
    assert "code" not in line


async def test_no_fields_are_made_for_a_log_that_leaves_the_line_out(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[RequestSummary] = []
    monkeypatch.setattr(RequestSummary, "fields", lambda summary: made.append(summary) or {})
    before = structlog.get_config()
    try:
        for level, lines in ((logging.WARNING, 0), (logging.INFO, 1)):
            structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))
            assert (await post(frontend(FakeIngress()).app, chat())).status == 200
            assert len(made) == lines
    finally:
        structlog.configure(**before)


async def test_the_log_line_has_the_workers_and_the_wait_that_the_ingress_heard_of() -> None:
    def travelled(job: Job) -> RequestTimeline:
        record = JobRecord(job.id, job.card.pool, 1, NO_READER, SUBMITTED_S)
        timeline = RequestTimeline(job, record, SUBMITTED_S, 0.0)
        started(timeline, 1, "w-1", 0.25)
        record.attempt, record.worker, record.finished[0] = 2, "w-2", end("stop")
        return timeline

    script = say("Hello")

    class Travelling(FakeIngress):
        async def submit(self, job: Job) -> FakeAnswer:
            answer = FakeAnswer(())
            self.answers.append(answer)
            answer.timeline = travelled(job)
            answer.push(*script(job))
            return answer

    ingress = Travelling()
    _, line = await answered(ingress, chat())
    assert (line["queue_s"], line["workers"], line["attempts"], line["finish_reason"]) == (0.25, ["w-1", "w-2"], 2, "stop")


@pytest.mark.parametrize("given", ["", "a b", "x" * 200, "a\nb"])
async def test_a_bad_or_missing_request_id_is_replaced(given: str) -> None:
    headers = {"x-request-id": given} if given else {}
    calls = [await post(frontend(FakeIngress()).app, chat(), headers=headers) for _ in range(2)]
    ids = {call.headers["x-request-id"] for call in calls}
    assert len(ids) == 2
    assert given not in ids


async def test_the_id_made_for_a_request_is_the_id_of_its_job() -> None:
    call = await post(frontend(FakeIngress()).app, chat())
    assert call.json()["id"] == f"chatcmpl-{call.headers['x-request-id']}"


async def test_errors_carry_the_request_id_too() -> None:
    assert "x-request-id" in (await post(frontend(FakeIngress()).app, b"{")).headers
    assert "x-request-id" in (await get(frontend(FakeIngress()).app, "/nope")).headers


async def test_models_are_loaded_as_they_appear_and_dropped_as_they_go() -> None:
    ingress = FakeIngress()
    ingress.models.served.clear()
    built = frontend(ingress)

    async def until(names: set[str]) -> None:
        async with asyncio.timeout(5):
            while built.site.model_cache.names() != names:
                await asyncio.sleep(0.001)

    task = asyncio.create_task(built.site.model_cache.run())
    try:
        ingress.models.served[MODEL] = FakeServed(CARD, FILES)
        ingress.models.served["bad"] = FakeServed(msgspec.structs.replace(CARD, model="bad", aliases=[]), {})
        for callback in ingress.models.callbacks:
            callback()
        await until({MODEL})
        ingress.models.served.clear()
        for callback in ingress.models.callbacks:
            callback()
        await until(set())
    finally:
        task.cancel()


async def test_a_changed_card_is_loaded_again() -> None:
    ingress = FakeIngress()
    built = frontend(ingress)
    first: Any = (await post(built.app, chat())).json()
    ingress.models.served[MODEL] = FakeServed(msgspec.structs.replace(CARD, context_length=64), FILES)
    call = await post(built.app, chat(max_tokens=100))
    assert call.error["code"] == "context_length_exceeded"
    second = (await post(built.app, chat())).json()
    assert first["system_fingerprint"] != second["system_fingerprint"]


@pytest.mark.parametrize(
    ("method", "path", "status", "kind"),
    [
        ("GET", "/v1/messages", 405, "invalid_request_error"),
        ("DELETE", "/v1/messages/count_tokens", 405, "invalid_request_error"),
        ("POST", "/v1/messages/", 404, "not_found_error"),
        ("POST", "/v1/messages/nonsense", 404, "not_found_error"),
        ("GET", "/v1/messages/batches", 404, "not_found_error"),
    ],
)
async def test_below_messages_it_is_anthropics(method: str, path: str, status: int, kind: str) -> None:
    call = await Call(frontend(FakeIngress()).app, path, {}, method=method).run()
    assert (call.status, call.json()["type"], call.error["type"]) == (status, "error", kind)
    assert set(call.error) == {"type", "message"}
    assert path in call.error["message"]


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'{"model":"m"}', b"\xff"])
@pytest.mark.parametrize("path", ["/v1/messages", "/v1/messages/count_tokens"])
async def test_a_bad_body_is_an_error_of_the_same_shape(path: str, body: bytes) -> None:
    call = await Call(frontend(FakeIngress()).app, path, body).run()
    assert (call.status, call.json()["type"], call.error["type"]) == (400, "error", "invalid_request_error")


async def test_a_client_of_anthropic_gets_it_everywhere_else_too() -> None:
    headers = {"anthropic-version": "2023-06-01"}
    call = await Call(frontend(FakeIngress()).app, "/v1/vector_stores", method="GET", headers=headers).run()
    assert (call.status, call.json()["type"]) == (404, "error")
    call = await Call(frontend(FakeIngress()).app, "/v1/vector_stores", method="GET").run()
    assert set(call.json()) == {"error"}


async def test_before_the_broker_can_be_used_as_well() -> None:
    app = StartupApp(Metrics(), Lifecycle())
    call = await Call(app, "/v1/messages", {}).run()
    assert (call.status, call.error["type"], call.headers["retry-after"]) == (529, "overloaded_error", "1")
    call = await Call(app, "/v1/chat/completions", {}).run()
    assert (call.status, call.error["code"]) == (503, "broker_unavailable")


async def test_methods_are_listed_in_one_order() -> None:
    call = await Call(frontend(FakeIngress()).app, "/v1/models", {}, method="PATCH").run()
    assert (call.status, call.headers["allow"]) == (405, "GET, HEAD")
