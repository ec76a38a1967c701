"""A tiny text model with random weights, and `headrace worker` processes that serve it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

START_S = 300.0
ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 512, "kv_cache_memory_bytes": 32 << 20, "max_num_seqs": 8}


def write_tiny_text(folder: Path, source: Path, *, experts: int = 0) -> Path:
    """Write a tiny Llama, or with `experts` a Mixtral, with random weights and the tokenizer of the bundled model."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape: dict[str, Any] = {
        "vocab_size": json.loads((source / "config.json").read_text())["vocab_size"],
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    if experts:
        model: Any = MixtralForCausalLM(MixtralConfig(**shape, num_local_experts=experts, num_experts_per_tok=1))
    else:
        model = LlamaForCausalLM(LlamaConfig(**shape))
    model.to(torch.float32).save_pretrained(folder)
    for file in source.iterdir():
        if file.name.startswith(("token", "chat", "generation")):
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


class WorkerProcess:
    """A `headrace worker` in a process of its own."""

    def __init__(
        self, name: str, folder: Path, nats: str, model: Path, *, served: str = "m", flags: Sequence[str] = (), **args: Any
    ) -> None:
        """The engine is vLLM, unless `flags`, which are the worker's, name another one. `args` are settings of the engine."""
        self.log_file = folder / f"{name}.log"
        given = args if "--engine" in flags else ARGS | args
        command = [sys.executable, "-P", "-m", "headrace", "worker", "--engine", "vllm", "--model", str(model)]
        command += ["--name", name, "--served-name", served, "--nats", nats, "--metrics-port", "0", *flags]
        command += [flag for key, value in given.items() for flag in ("--engine-arg", f"{key}={json.dumps(value)}")]
        environ = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE_")}
        environ |= {"OMP_NUM_THREADS": "1", "VLLM_HOST_IP": "127.0.0.1"}
        with self.log_file.open("wb") as log:
            self.process = subprocess.Popen(command, stdout=log, stderr=log, env=environ, cwd=folder)

    def events(self, name: str) -> list[dict[str, Any]]:
        lines = [line for line in self.log_file.read_text(errors="replace").splitlines() if line.startswith("{")]
        return [event for line in lines if (event := json.loads(line)).get("event") == name]

    def until(self, what: str, met: Callable[[], bool], within_s: float = START_S) -> None:
        deadline = time.monotonic() + within_s
        while not met():
            log = self.log_file.read_text(errors="replace")[-5000:]
            assert self.process.poll() is None, f"ended with {self.process.returncode} before {what}:\n{log}"
            assert time.monotonic() < deadline, f"not in time: {what}:\n{log}"
            time.sleep(0.1)

    def __enter__(self) -> WorkerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(30)
            except subprocess.TimeoutExpired:
                self.process.kill()
        self.process.wait()


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])
