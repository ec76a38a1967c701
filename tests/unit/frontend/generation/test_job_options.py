"""Headers that say where a request is to run, and the one that tells where it did."""

from __future__ import annotations

import json

import pytest

from headrace.broker.messages.control import Candidate, Explanation
from headrace.frontend.generation.explain import MAX_HEADER_BYTES, decision_header
from tests.support.frontend.fakes import MODEL, FakeIngress, chat, frontend, post


async def test_headers_become_wishes_and_reach_the_stored_message() -> None:
    headers = {
        "x-session-id": "user-7/chat.1",
        "x-headrace-session-affinity": "hard",
        "x-headrace-worker": "worker-2-68a1",
        "x-headrace-require-labels": "zone-a, h100",
        "x-headrace-prefer-labels": "rack-1=1.5,rack-2,old=-2",
        "x-headrace-explain": "1",
    }
    ingress = FakeIngress()
    assert (await post(frontend(ingress).app, chat(session_id="of the body"), headers=headers)).status == 200
    (job,) = ingress.jobs
    assert (job.session, job.affinity, job.worker, job.explain) == ("user-7/chat.1", "hard", "worker-2-68a1", True)
    assert job.generation.session_id == "user-7/chat.1"
    assert job.require == ["zone-a", "h100"]
    assert job.prefer == {"rack-1": 1.5, "rack-2": 1.0, "old": -2.0}
    envelope = job.envelope(judge="j", now=0.0, payload=b"", spill=None)
    assert (envelope.session, envelope.affinity, envelope.worker) == (job.session, "hard", job.worker)
    assert (envelope.require, envelope.prefer) == (job.require, job.prefer)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-session-id", ""),
        ("x-session-id", "two words"),
        ("x-session-id", "x" * 257),
        ("x-headrace-session-affinity", "firm"),
        ("x-headrace-session-affinity", "hard"),  # without a session there is nothing to hold on to
        ("x-headrace-worker", "a.b"),
        ("x-headrace-worker", ""),
        ("x-headrace-require-labels", "a,,b"),
        ("x-headrace-require-labels", ",".join(f"label-{n}" for n in range(33))),
        ("x-headrace-prefer-labels", "a=much"),
        ("x-headrace-prefer-labels", "a=0"),
        ("x-headrace-prefer-labels", "a=nan"),
        ("x-headrace-prefer-labels", "a=1e9"),
        ("x-headrace-explain", "please"),
        ("x-headrace-ttft-target", "soon"),
        ("x-headrace-ttft-target", "-1"),
        ("x-headrace-ttft-target", "nan"),
        ("x-headrace-itl-target", "inf"),
    ],
)
async def test_a_wrong_header_is_a_400_that_names_it_and_its_value(name: str, value: str) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, chat(), headers={name: value})
    assert (call.status, call.error["param"]) == (400, name)
    assert name in call.error["message"]
    assert value[:200] in call.error["message"]
    assert ingress.jobs == []


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_asks_is_told_why_it_ran_where_it_did(stream: bool) -> None:
    ingress = FakeIngress()
    candidates = [Candidate(worker="w2", cost_s=0.123456), Candidate(worker="w1", cost_s=0.5)]
    ingress.explanation = Explanation(id="x", router="r1", worker="w1", reason="prefix", candidates=candidates)
    call = await post(frontend(ingress).app, chat(stream=stream), headers={"x-headrace-explain": "1"})
    assert call.status == 200
    told = json.loads(call.headers["x-headrace-decision"])
    assert (told["router"], told["worker"], told["reason"], told["known"]) == ("r1", "w1", "prefix", True)
    assert [candidate["worker"] for candidate in told["candidates"]] == ["w1", "w2"]
    assert told["candidates"][1]["cost_s"] == 0.1235
    assert ingress.explained == [ingress.jobs[0].id]


def test_a_long_decision_is_cut_to_what_servers_take_and_says_so() -> None:
    candidates = [Candidate(worker=f"worker-{n:04}", uncached=n, cost_s=float(n)) for n in range(500)]
    line = decision_header(Explanation(id="x", worker="worker-0400", candidates=candidates))
    assert len(line) <= MAX_HEADER_BYTES
    told = json.loads(line)
    assert told["candidates"][0]["worker"] == "worker-0400"
    assert told["left_out"] + len(told["candidates"]) == 500


async def test_targets_of_headers_and_of_the_body_reach_the_stored_message_and_headers_win() -> None:
    ingress = FakeIngress()
    nvext = {"router": {"ttft_target": 250, "itl_target": 0}, "agent_hints": {"priority": 7, "osl": 3}, "annotations": []}
    await post(frontend(ingress).app, chat(nvext=nvext))
    await post(frontend(ingress).app, chat(nvext=nvext), headers={"x-headrace-ttft-target": "0"})
    await post(frontend(ingress).app, chat(), headers={"x-headrace-itl-target": "40"})
    first, second, third = (job.envelope(judge="j", now=0.0, payload=b"", spill=None) for job in ingress.jobs)
    assert (first.ttft_target_s, first.itl_target_s, first.agent_priority) == (0.25, 0.0, 7)
    assert (second.ttft_target_s, second.itl_target_s) == (0.0, 0.0)
    assert (third.ttft_target_s, third.itl_target_s, third.agent_priority) == (None, 0.04, None)


@pytest.mark.parametrize("router", [{"ttft_target": -1}, {"itl_target": "soon"}, {"ttft_target": 1e10}])
async def test_a_wrong_target_of_the_body_is_a_400_that_names_it(router: dict[str, object]) -> None:
    ingress = FakeIngress()
    call = await post(frontend(ingress).app, chat(nvext={"router": router}))
    assert call.status == 400
    assert next(iter(router)) in call.error["message"] + (call.error["param"] or "")
    assert ingress.jobs == []


async def test_targets_are_read_in_the_messages_and_in_the_responses_api_too() -> None:
    nvext = {"router": {"ttft_target": 250}}
    for path, body in (
        ("/v1/messages", {"model": MODEL, "max_tokens": 3, "messages": [{"role": "user", "content": "hi"}], "nvext": nvext}),
        ("/v1/responses", {"model": MODEL, "input": "hi", "nvext": nvext}),
        ("/v1/completions", {"model": MODEL, "prompt": "hi", "nvext": nvext}),
    ):
        ingress = FakeIngress()
        await post(frontend(ingress).app, body, path=path)
        assert [job.ttft_target_s for job in ingress.jobs] == [0.25], path
