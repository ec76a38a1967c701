"""Prefill and decode on two machines with real vLLM engines: the same text as vLLM alone, and no variable exported."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.jetstream.embedded_server import find_binary
from tests.engines.conftest import ARGS, DIRECT_TOKENS
from tests.support.nixl_peer import needs_nixl
from tests.support.two_machines import ADDRESSES, NATS, Machine, two_machines, until

pytestmark = [pytest.mark.engine, pytest.mark.long_engine, needs_nixl, pytest.mark.timeout(700)]

ENGINE_START_S = 240.0


@pytest.fixture
def machines(tmp_path: Path, direct: list[list[int]]) -> Iterator[tuple[Machine, Machine]]:
    """Depends on `direct` only so that no third engine is up at the same time."""
    with two_machines(tmp_path) as both:
        yield both


def test_a_prompt_computed_on_another_machine_gives_the_same_text(
    machines: tuple[Machine, Machine],
    tmp_path: Path,
    model_dir: Path,
    prompts: list[list[int]],
    direct: list[list[int]],
    tokenizer: Any,
) -> None:
    one, other = machines
    until(
        "nats-server",
        one.start("nats", str(find_binary()), "-js", "-a", ADDRESSES[0], "-sd", str(tmp_path / "store")),
        "is ready",
    )
    engine = [word for name, value in ARGS.items() for word in ("--engine-arg", f"{name}={value}")]
    engine += ["--engine", "vllm", "--model", str(model_dir), "--served-name", "small", "--nats", NATS]
    prefill = other.headrace("prefill", "worker", "--role", "prefill", "--name", "p", *engine)
    decode = one.headrace(
        "decode", "worker", "--role", "decode", "--name", "d", "--prefill", "always", "--metrics-port", "9100", *engine
    )
    for name, log in (("prefill", prefill), ("decode", decode)):
        until(name, log, "worker.ready", ENGINE_START_S)
    until("the engines have met", decode, "peer.met", ENGINE_START_S)
    until("frontend", one.headrace("frontend", "frontend", "--port", "8000", "--nats", NATS), "frontend.listening")
    one.until_ready("http://127.0.0.1:8000/ready")
    before = other.sent()
    for prompt, tokens in zip(prompts, direct, strict=True):
        body = {"model": "small", "prompt": prompt, "max_tokens": DIRECT_TOKENS, "temperature": 0}
        answer = one.ask("http://127.0.0.1:8000/v1/completions", body)
        assert answer["choices"][0]["text"] == tokenizer.decode(tokens)
    shown = one.metrics(9100)
    prefills = {name: value for name, value in shown.items() if name.startswith("headrace_worker_prefills_total{")}
    assert sum(value for name, value in prefills.items() if 'where="remote"' in name) == len(prompts), prefills
    assert other.sent() - before > 1 << 20, "the blocks went over the cable"
    assert "prefill.failed" not in decode.read_text()
