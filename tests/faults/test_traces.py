"""A request whose worker is killed arrives at a receiver as one trace of frontend, router and both workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator

import openai
import pytest

from tests.faults.test_workers_come_and_go import SLOW, holders
from tests.support.otlp_receiver import OtlpReceiver, Received, otlp_receiver
from tests.support.up_process import RunningUp

pytestmark = pytest.mark.fault

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
PROMPT = list(range(200, 260))


@pytest.fixture
def receiver() -> Iterator[OtlpReceiver]:
    with otlp_receiver() as running:
        yield running


def in_trace(receiver: OtlpReceiver, name: str) -> list[Received]:
    return [span for span in receiver.spans if span.trace == TRACE and span.name == name]


@pytest.mark.parametrize("login", ["none", "roles"])
def test_a_killed_worker_is_seen_in_the_trace_of_its_request(
    start: Callable[..., RunningUp], receiver: OtlpReceiver, login: str
) -> None:
    flags = ("--trace-endpoint", receiver.url, "--trace-sample", "0", "--nats-login", login)
    up = start("--workers", "2", "--routers", "1", *flags, *SLOW)
    up.until("the router works", lambda: bool(up.events("router.ready")))
    up.until("both workers joined", lambda: len(holders(up)) == 2)
    killed = ""
    with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=60) as api:
        answer = api.completions.create(
            model="sim",
            prompt=PROMPT,
            max_tokens=200,
            stream=True,
            extra_body={"ignore_eos": True},
            extra_headers={"traceparent": f"00-{TRACE}-{PARENT}-01"},
        )
        for number, _ in enumerate(answer):
            if number == 60:
                ((killed, (pid, _)),) = [(worker, held) for worker, held in holders(up).items() if held[1]]
                os.kill(pid, signal.SIGKILL)
    up.until("the trace has arrived", lambda: bool(in_trace(receiver, "text_completion sim")))
    assert set(receiver.paths) == {"/v1/traces"}
    (root,) = in_trace(receiver, "text_completion sim")
    assert (root.parent, root.service, root.failed) == (PARENT, "headrace-frontend", False)
    assert root.attributes["gen_ai.usage.output_tokens"] == 200
    assert root.attributes["headrace.attempts"] == 2
    assert root.attributes["gen_ai.response.finish_reasons"] == ["length"]
    inner = [span for span in receiver.spans if span.trace == TRACE and span is not root]
    assert {span.parent for span in inner} == {root.id}
    assert all(root.begin_ns <= span.begin_ns <= span.end_ns <= root.end_ns + 50_000_000 for span in inner)
    queues, decodes = in_trace(receiver, "queue"), in_trace(receiver, "decode")
    assert [span.service for span in queues] == ["headrace-router"] * 2
    assert [(span.attributes["headrace.attempt"], span.service) for span in decodes] == [
        (1, "headrace-worker"),
        (2, "headrace-worker"),
    ]
    assert decodes[0].instance == killed != decodes[1].instance
    assert (decodes[0].links, decodes[1].links) == ([], [decodes[0].id])


def test_a_request_goes_on_while_the_receiver_is_broken(start: Callable[..., RunningUp], receiver: OtlpReceiver) -> None:
    receiver.status = 400
    up = start("--trace-endpoint", receiver.url, "--trace-sample", "1")
    assert up.chat()
    up.until("the failure was logged", lambda: bool(up.events("traces.not_exported")))
    assert up.chat()
    assert receiver.spans == []
