"""A deployment with prefill and decode apart: the second turn of a conversation is read from the decode worker."""

from __future__ import annotations

import re
import urllib.request
from pathlib import Path

import openai
import pytest

from headrace.workers.sim.tokens import expected_ids, expected_text
from tests.integration.headrace.test_operator_commands import headrace
from tests.support.handovers import no_block_is_kept, workers
from tests.support.nixl_peer import needs_nixl
from tests.support.up_process import RunningUp

pytestmark = [pytest.mark.deployment, needs_nixl]

FIRST = list(range(1000, 1500))
ANSWER = 100


def metric(up: RunningUp, worker: str, pattern: str) -> float:
    (port,) = {event["port"] for event in up.events("metrics.listening") if event.get("worker") == worker}
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(pattern, line))


def test_the_prefill_worker_reads_what_the_decode_worker_has_of_the_second_turn(tmp_path: Path) -> None:
    flags = ("--mode", "disagg", "--prefill", "always", "--routers", "0", "--metrics-port", "0")
    up = RunningUp(tmp_path, *flags, "--engine-arg", "transfer_mode=pull")
    try:
        up.until_ready()
        up.until("both have joined", lambda: set(workers(up)) == {"decode-1", "prefill-1"})
        up.until("they have met", lambda: bool(up.events("peer.met")))
        with openai.OpenAI(base_url=f"{up.state()['url']}/v1", api_key="none", max_retries=0, timeout=60) as api:

            def ask(prompt: list[int], tokens: int) -> str:
                answer = api.completions.create(
                    model="sim", prompt=prompt, max_tokens=tokens, temperature=0, extra_body={"ignore_eos": True}
                )
                return answer.choices[0].text

            assert ask(FIRST, ANSWER) == expected_text(FIRST, ANSWER)
            assert metric(up, "decode-1", r"headrace_worker_prefix_loans_total\{") == 0, "there was nothing to lend"
            reset = headrace(tmp_path, "worker", "reset-cache", "prefill-1")
            assert reset.returncode == 0, reset.stderr
            second = [*FIRST, *expected_ids(FIRST, ANSWER), *range(2000, 2100)]
            assert ask(second, 20) == expected_text(second, 20)
        assert metric(up, "decode-1", r'headrace_worker_prefix_loans_total\{outcome="lent"') == 1
        assert metric(up, "prefill-1", r'headrace_worker_prefix_reads_total\{outcome="read"') == 1
        read = metric(up, "prefill-1", r'headrace_worker_prefilled_tokens_total\{kind="read"')
        assert len(FIRST) < read <= len(FIRST) + ANSWER, "the first turn with its answer, in whole blocks and a token"
        assert metric(up, "decode-1", r"headrace_worker_prefill_failures_total\{") == 0
        no_block_is_kept(up, 2)
    finally:
        up.stop()
