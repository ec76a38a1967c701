"""A real vLLM engine in float32 for the tests of a file that need no other, and what real engines answer by themselves."""

from __future__ import annotations

import asyncio
import fcntl
import itertools
import json
import os
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from xdist.scheduler import LoadFileScheduling

from headrace.broker.messages.requests import Sampling
from headrace.workers import bundled_model
from headrace.workers.engine import EngineConfig, EngineInfo, Output, Sequence
from tests.engines.support.sglang_args import ARGS as SGLANG_ARGS

ROOT = Path(__file__).parents[2]
SERVED = "tests/engines/served/"
ARGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 96 << 20, "max_num_seqs": 8}
QUESTIONS = ("What is the capital of France?", "Name three colours.", "Write one sentence about the sea.")
DIRECT_TOKENS = 32

# vLLM's core computes by itself in vLLM's own programs too, as it does in a worker of Headrace: not in a process that would
# import vLLM for another ten seconds first.
FEWER_PROCESSES = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0"}

if int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", "1")) > 1:  # several engines at once: none should wait on the other's core
    os.environ.setdefault("OMP_NUM_THREADS", "1")


def chat(question: str) -> str:
    return (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    )


def pytest_itemcollected(item: pytest.Item) -> None:
    """`make` runs this folder for its mark alone: nothing in it may be without."""
    item.add_marker("engine")


class InFolders(LoadFileScheduling):  # type: ignore[misc]
    """A process for each file, but one for all of `served`, whose two servers would start anew for each file."""

    def _split_scope(self, nodeid: str) -> str:
        file = str(super()._split_scope(nodeid))
        return SERVED if file.startswith(SERVED) else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> InFolders | None:
    return InFolders(config, log) if config.getoption("dist") == "loadfile" else None


@pytest.fixture(scope="session")
def model_dir() -> Path:
    return bundled_model.prepare(
        Path(os.environ.get("HEADRACE_DATA_DIR", ROOT / ".headrace")) / "models" / bundled_model.NAME, progress=print
    )


LAYERS = (0, 1, 2, 28)  # varied answers that do repeat themselves


@pytest.fixture(scope="session")
def cut_model_dir(model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The bundled model with four of its thirty layers: its steps take a third of the time and its answers make no sense."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("models") / "cut"
    shutil.copytree(model_dir, folder, ignore=shutil.ignore_patterns("model.safetensors"))
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": len(LAYERS)}))
    kept = {f"model.layers.{old}.": f"model.layers.{new}." for new, old in enumerate(LAYERS)}
    tensors = {}
    with safe_open(model_dir / "model.safetensors", "pt") as weights:
        for name in weights.keys():  # noqa: SIM118 - it has no iterator
            layer = ".".join(name.split(".")[:3]) + "." if ".layers." in name else ""
            if not layer or layer in kept:
                tensors[name.replace(layer, kept[layer], 1) if layer else name] = weights.get_tensor(name)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="session")
def tokenizer(model_dir: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model_dir / "tokenizer.json"))


@pytest.fixture(scope="session")
def prompts(tokenizer: Any) -> list[list[int]]:
    return [tokenizer.encode(chat(question), add_special_tokens=False).ids for question in QUESTIONS]


@pytest.fixture(scope="session")
def direct(model_dir: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What vLLM's own offline API answers to each prompt at temperature 0, one prompt at a time, in a process of its own."""
    environ = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **FEWER_PROCESSES,
    }
    order = {"model": str(model_dir), "args": ARGS, "prompts": prompts, "max_tokens": DIRECT_TOKENS}
    return asked_once(tmp_path_factory, "direct", order, environ=environ, timeout_s=600)


@pytest.fixture(scope="session")
def direct_sglang(model_dir: Path, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    """What SGLang's own offline API answers, likewise."""
    order = {"model": str(model_dir), "args": SGLANG_ARGS, "prompts": prompts, "max_tokens": DIRECT_TOKENS}
    return asked_once(tmp_path_factory, "direct_sglang", order, environ={}, timeout_s=600)


def asked_once(
    factory: pytest.TempPathFactory, program: str, order: dict[str, Any], *, environ: dict[str, str], timeout_s: float
) -> list[Any]:
    """Ask a program of `support` for its answers, once, however many processes the tests run in."""
    folder = factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    kept = folder / f"{program}.json"
    with (folder / f"{program}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not kept.exists():
            kept.write_text(json.dumps(ask_directly(program, order, environ=environ, timeout_s=timeout_s)))
        answers: list[Any] = json.loads(kept.read_text())
    return answers


def ask_directly(program: str, order: dict[str, Any], *, environ: dict[str, str], timeout_s: float) -> list[Any]:
    done = subprocess.run(
        [sys.executable, "-m", f"tests.engines.support.{program}"],
        input=json.dumps(order),
        capture_output=True,
        text=True,
        timeout=timeout_s,
        cwd=ROOT,
        env=os.environ | environ,
        check=False,
    )
    told = [line for line in done.stdout.splitlines() if line.startswith("answers ")]
    assert told, done.stderr[-2000:]
    answers: list[Any] = json.loads(told[0].removeprefix("answers "))
    return answers


class Bench:
    """A started engine and what came out of it."""

    def __init__(self) -> None:
        from headrace.workers.vllm.engine import VllmEngine

        self.engine = VllmEngine()
        self.info: EngineInfo | None = None
        self.calls: list[list[Output]] = []
        self.outputs: dict[str, list[Output]] = {}
        self.ended: dict[str, asyncio.Event] = {}
        self._numbers = itertools.count()

    def sink(self, outputs: list[Output]) -> None:
        self.calls.append(outputs)
        for output in outputs:
            self.outputs[output.id].append(output)
            if output.finish or output.fault:
                self.ended[output.id].set()

    async def submit(self, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> str:
        name = f"t{next(self._numbers)}-1-0"
        self.outputs[name] = []
        self.ended[name] = asyncio.Event()
        sampling = sampling or Sampling(temperature=0.0, max_tokens=16)
        options = {"prompt_tokens": len(token_ids)} | options
        await self.engine.submit(Sequence(id=name, token_ids=list(token_ids), sampling=sampling, **options))
        return name

    async def end(self, name: str) -> list[Output]:
        async with asyncio.timeout(60):
            await self.ended[name].wait()
        return self.outputs[name]

    async def ids(self, token_ids: list[int], sampling: Sampling | None = None, **options: Any) -> list[int]:
        outputs = await self.end(await self.submit(token_ids, sampling, **options))
        assert outputs[-1].fault is None, outputs[-1].fault
        return [token for output in outputs for token in output.ids]


@pytest.fixture(scope="module")
def bench_model(model_dir: Path, direct: list[list[int]]) -> Path:
    """Depends on `direct` only so that the two engines are not up at the same time."""
    return model_dir


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def bench(bench_model: Path) -> AsyncIterator[Bench]:
    """Of one file, so that no idle engine keeps its memory while others start."""
    bench = Bench()
    async with asyncio.timeout(180):
        bench.info = await bench.engine.start(
            EngineConfig(model=str(bench_model), served_name="smollm2", args=ARGS), bench.sink
        )
    yield bench
    await bench.engine.stop(5.0)
