"""An engine over vLLM-Omni's `AsyncOmni`: one client for a row of stages, of which the first one's text is asked for.

Models that also speak or draw are several models in a row. Sound and images of later stages are not asked for, since a row of
an answer has no place for them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence as Seq
from contextlib import aclosing, suppress
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.workers.blocking import run_in_thread
from headrace.workers.engine import (
    Capabilities,
    EngineConfig,
    EngineInfo,
    Fault,
    Load,
    Output,
    Role,
    Sequence,
    Sink,
)
from headrace.workers.errors import EngineDead, EngineStartFailed, RequestInvalid, UnsupportedByEngine, WorkerError
from headrace.workers.kit import GUIDED, EngineSupport, not_installed, refuse_undeclared, starting, words
from headrace.workers.tokens import token_table
from headrace.workers.vllm import convert
from headrace.workers.vllm.convert import CoreEngine
from headrace.workers.vllm.settings import prepare_environment

ABILITIES = Capabilities(resume_repetition=True, logprobs=True, prompt_logprobs=True, guided=GUIDED, cache_salt=True)

SUPPORT = EngineSupport(name="omni", title="vLLM-Omni 0.30 (stand-in)", words=words(ABILITIES, ("chat", "completion")))
TEXT = "text"
_OURS = {"model": "--model", "served_model_name": "--served-name", "seed": "--seed", "output_modalities": "this adapter"}


@dataclass(frozen=True, slots=True)
class StartedStages:
    omni: Any
    info: EngineInfo


def start_stages(config: EngineConfig) -> StartedStages:
    """Import vLLM-Omni and wait until all stages are ready. Blocks for minutes. Raises EngineStartFailed."""
    try:
        package = import_module("vllm_omni")
    except ImportError as error:
        raise not_installed("vLLM-Omni", error, "`pip install vllm-omni`") from error
    for name in _OURS.keys() & config.args.keys():
        raise EngineStartFailed(f"{name!r} is not an engine setting here: it belongs to {_OURS[name]}")
    with starting("vLLM-Omni", config.model):
        omni = package.AsyncOmni(model=config.model, seed=config.seed, **config.args)
    try:
        return StartedStages(omni, _describe(omni, str(package.__version__)))
    except BaseException:
        omni.shutdown()
        raise


def _describe(omni: Any, version: str) -> EngineInfo:
    """Describe the first stage. Raises EngineStartFailed unless that is the one that writes text."""
    vllm_config = omni.vllm_config
    if vllm_config is None or not omni.output_modalities or omni.output_modalities[0] != TEXT:
        made = ", ".join(str(kind) for kind in omni.output_modalities) or "nothing"
        raise EngineStartFailed(f"the first stage of {omni.model} writes no text; its stages give: {made}")
    model, cache = vllm_config.model_config, vllm_config.cache_config
    folder = Path(model.tokenizer)
    if not (folder / "tokenizer.json").is_file():
        raise EngineStartFailed(f"{model.tokenizer} is no folder with a tokenizer.json; give the model as a folder")
    return EngineInfo(
        engine="omni",
        version=version,
        tokenizer_dir=str(folder),
        context_length=model.max_model_len,
        block_size=cache.block_size,
        blocks=cache.num_gpu_blocks or 0,
        slots=vllm_config.scheduler_config.max_num_seqs,
        vocab_size=model.get_vocab_size(),
        eos_token_ids=convert.eos_ids(omni),
        default_sampling=model.get_diff_sampling_param(),
        extra={"stages": list(omni.output_modalities)},
    )


class OmniEngine(CoreEngine):
    """The stages of one model. Started once, stopped once."""

    NAME = "vLLM-Omni"
    capabilities: Capabilities = ABILITIES

    def __init__(self) -> None:
        super().__init__()
        self._started: StartedStages | None = None
        self._runs: dict[str, Sequence] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._sink: Sink | None = None
        self._step: list[Output] = []

    async def start(self, config: EngineConfig, sink: Sink) -> EngineInfo:
        if config.role is not Role.AGGREGATED:
            raise UnsupportedByEngine(f"vLLM-Omni hands nothing over: it cannot be {config.role.value}")
        prepare_environment(config, os.environ)
        try:
            self._started = await run_in_thread(lambda: start_stages(config), name="omni-start")
        except BaseException:
            await self._kill_processes(quiet=True)
            raise
        self._processes.remember()
        self._sink = sink
        self._token_bytes = token_table(self._started.info.tokenizer_dir).token_bytes
        return self._started.info

    async def submit(self, sequence: Sequence) -> None:
        started = self._alive()
        refuse_undeclared(self.capabilities, sequence)
        left = started.info.context_length - len(sequence.token_ids)
        if left < 1:
            raise RequestInvalid(f"the prompt leaves no room in a context of {started.info.context_length}", param="prompt")
        params = convert.to_sampling_params(sequence)
        try:
            _verify(params, started.omni)
        except Exception as error:
            raise self._translate(error) from error
        self._runs[sequence.id] = sequence
        task = asyncio.create_task(self._answer(started, sequence, params), name=f"omni-{sequence.id}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, started: StartedStages, sequence: Sequence, params: Any) -> None:
        eos, first = frozenset(started.info.eos_token_ids), True
        results = started.omni.generate(
            convert.to_prompt(sequence),
            sampling_params=params,
            request_id=sequence.id,
            output_modalities=[TEXT],
        )
        try:
            async with aclosing(results):
                async for result in results:
                    if self._runs.get(sequence.id) is not sequence:
                        return
                    if result.error is not None:
                        raise WorkerError(f"stage {result.stage_id}: {result.error}")
                    if result.final_output_type != TEXT or not result.outputs:
                        continue
                    output = convert.to_output(sequence, result, first=first, eos=eos, token_bytes=self._token_bytes)
                    first = False
                    if output.finish or output.fault:
                        del self._runs[sequence.id]
                    self._give(output)
        except Exception as error:
            self._failed(sequence, error)

    def _give(self, output: Output) -> None:
        """Hand an output on together with the others of its step, which arrive in the same turn of the event loop."""
        if any(given.id == output.id for given in self._step):
            self._flush()
        if not self._step:
            asyncio.get_running_loop().call_soon(self._flush)
        self._step.append(output)

    def _flush(self) -> None:
        step, self._step = self._step, []
        if step and self._sink is not None:
            self._sink(step)

    def _failed(self, sequence: Sequence, error: BaseException) -> None:
        translated = self._translate(error)
        if self._runs.pop(sequence.id, None) is None or isinstance(translated, EngineDead):
            return
        code = "invalid_request" if isinstance(translated, RequestInvalid) else "engine_error"
        self._give(Output(sequence.id, [], fault=Fault(code, str(translated), retriable=code == "engine_error")))

    async def abort(self, ids: Seq[str]) -> None:
        known = [one for one in ids if self._runs.pop(one, None) is not None]
        self._step = [output for output in self._step if output.id not in known]
        if known and self._started is not None:
            with suppress(Exception):  # a dying engine aborts everything by itself
                await self._started.omni.abort(known)

    def load(self) -> Load:
        info = self._started.info if self._started is not None else None
        if info is None:
            return Load()
        used = sum(len(one.token_ids) // info.block_size + 1 for one in self._runs.values())
        running = min(len(self._runs), info.slots)
        return Load(
            running=running,
            waiting=len(self._runs) - running,
            blocks_used=min(used, info.blocks),
            blocks_total=info.blocks,
        )

    async def healthy(self) -> None:
        started = self._alive()
        try:
            await started.omni.check_health()
        except Exception as error:
            raise self._translate(error) from error

    async def stop(self, grace_s: float) -> None:
        started, self._started = self._started, None
        self._runs.clear()
        if started is not None:
            self._processes.remember()
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s + 1):
                    await asyncio.to_thread(started.omni.shutdown, grace_s)
            for task in self._tasks:
                task.cancel()
            if self._tasks:
                await asyncio.wait(self._tasks, timeout=grace_s)
        await self._kill_processes()

    def look(self) -> None:
        if self._started is not None and self._started.omni.errored:
            self.declare_dead("vLLM-Omni's orchestrator is gone; its own log lines say why")

    def _alive(self) -> StartedStages:
        self.check_alive()
        if self._started is None:
            raise EngineDead("the engine is not running")
        return self._started

    def dropped(self) -> int:
        dropped = len(self._runs)
        self._runs.clear()
        return dropped


def _verify(params: Any, omni: Any) -> None:
    """Check sampling parameters as vLLM does, before the request is on its way. Raises vLLM's own exception."""
    config = omni.vllm_config
    tokenizer = omni.renderer.get_tokenizer()
    params.verify(config.model_config, config.speculative_config, config.structured_outputs_config, tokenizer)
