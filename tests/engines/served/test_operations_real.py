"""Operators' commands to a worker with the real vLLM: it sleeps, is paused, forgets its cache, and serves as before."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.engines.served.conftest import MODEL
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.engine, pytest.mark.timeout(700)]

QUESTION = "Write three sentences about rivers, and three about the sea, and then say which you prefer and why."


def headrace(up: RunningUp, *words: str) -> subprocess.CompletedProcess[str]:
    """A command as it is typed, in the deployment's own folder."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
    command = [sys.executable, "-P", "-m", "headrace", "worker", *words]
    folder = up.run_file.parents[2]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=200, check=False)


def told(up: RunningUp, *words: str) -> str:
    done = headrace(up, *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def ask(url: str, *, tokens: int = 48, stream: bool = False, **more: Any) -> Any:
    body = {"model": MODEL, "messages": [{"role": "user", "content": QUESTION}], "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body | {"stream": stream} | more).encode(),
        {"Content-Type": "application/json"},
    )
    answer = urllib.request.urlopen(request, timeout=120)
    if stream:
        return answer
    with answer:
        return json.load(answer)


def text(answer: Any) -> str:
    said: str = answer["choices"][0]["message"]["content"]
    return said


def pieces(answer: Any) -> Any:
    """The text of each event of a stream, as it comes."""
    for line in answer:
        if line.startswith(b"data: {"):
            yield json.loads(line[6:])["choices"][0]["delta"].get("content") or ""


@pytest.fixture(scope="module")
def before(ours: str) -> str:
    return text(ask(ours))


def test_its_health_is_that_of_the_engine(our_up: RunningUp) -> None:
    found = json.loads(told(our_up, "health", "worker-1", "--json"))
    assert found["healthy"]
    assert found["engine"] == "vllm"
    assert 0 < found["canary_s"] < 10


def test_an_answer_stands_still_in_a_pause_and_goes_on(our_up: RunningUp, ours: str) -> None:
    long: dict[str, Any] = {"tokens": 200, "ignore_eos": True}  # it is not over before the command has started
    before = text(ask(ours, **long))
    stream = ask(ours, stream=True, **long)
    coming = pieces(stream)
    first = "".join(next(coming) for _ in range(4))
    assert "held  1" in told(our_up, "pause", "worker-1")
    with ThreadPoolExecutor() as pool:
        rest = pool.submit(lambda: "".join(coming))
        assert "paused" in told(our_up, "status")
        assert not rest.done()
        told(our_up, "resume", "worker-1")
        assert first + rest.result(60) == before


def test_a_reset_cache_has_to_be_filled_again(our_up: RunningUp, ours: str, before: str) -> None:
    def cached() -> int:
        return int((ask(ours, tokens=2)["usage"].get("prompt_tokens_details") or {}).get("cached_tokens") or 0)

    cached()
    assert cached() > 0
    told(our_up, "reset-cache", "worker-1")
    assert cached() == 0


def test_it_sleeps_and_answers_the_same_when_woken(our_up: RunningUp, ours: str, before: str) -> None:
    slept = told(our_up, "sleep", "worker-1", "--grace", "20")
    assert "host_bytes_freed" in slept
    assert "asleep (1)" in told(our_up, "status")
    with ThreadPoolExecutor() as pool:
        late = pool.submit(ask, ours)  # it waits for a worker
        assert "warm_s" in told(our_up, "wake", "worker-1")
        assert text(late.result(60)) == before


def test_what_it_was_not_started_for_is_refused_with_what_it_takes(our_up: RunningUp) -> None:
    done = headrace(our_up, "profile", "start", "worker-1")
    assert done.returncode == 1
    assert "it can when started with `profiler_config`" in done.stderr


def test_its_log_level_can_be_changed(our_up: RunningUp, ours: str) -> None:
    told(our_up, "log-level", "worker-1", "debug")
    ask(ours, tokens=2)
    told(our_up, "log-level", "worker-1", "info")
    lines = [json.loads(line) for line in our_up.log_file.read_text().splitlines()]
    assert [line for line in lines if line.get("level") == "debug" and line.get("component") == "worker"]


def read(url: str) -> dict[str, float]:
    """Return the samples of a page of metrics, on which each name stands once."""
    with urllib.request.urlopen(url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    names = [line.split()[2] for line in lines if line.startswith("# TYPE")]
    assert len(set(names)) == len(names), "each name once"
    samples = (line.rsplit(" ", 1) for line in lines if line and not line.startswith("#"))
    return {name: float(value) for name, value in samples}


def test_its_metrics_show_the_engines_beside_ours(our_up: RunningUp, ours: str) -> None:
    ask(ours, tokens=2)
    (worker,) = our_up.state()["workers"]
    url = f"http://127.0.0.1:{worker['metrics_port']}/metrics"
    # the load is told at most every half second, and what has ended may still be in the last report
    our_up.until("the gauge follows the engine", lambda: read(url)['headrace_worker_engine_running{rank="0"}'] == 0, 30)
    samples = read(url)
    assert samples['vllm:request_success_total{engine="0",finished_reason="length",model_name="small"}'] > 0
    assert samples['vllm:num_requests_running{engine="0",model_name="small"}'] == 0
    assert samples['headrace_worker_engine_blocks{rank="0"}'] > 0
    assert samples['headrace_worker_kv_ok{rank="0"}'] == 1
