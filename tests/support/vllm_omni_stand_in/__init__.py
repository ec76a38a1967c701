"""A stand-in for the package vllm-omni 0.30: its `AsyncOmni` with one real stage, which writes text, and a silent one.

Only what the adapter may use by that version's interface is there; anything else is an AttributeError or a TypeError. The text
stage is a real vLLM; the stage behind it, which would speak, gives nothing unless it is asked for.
"""

from __future__ import annotations

import sys
import uuid
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from types import ModuleType, SimpleNamespace
from typing import Any

VERSION = "0.30.0"
MODALITIES = ("text", "audio")


class AsyncOmni:
    """Stages from settings; requests go in at the first one."""

    def __init__(self, model: str = "", **kwargs: Any) -> None:
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        for name in ("engine_args", "log_requests", "diffusion_batch_size"):
            if name in kwargs:
                raise TypeError(f"{name} is not taken")
        self.model = model
        self.output_modalities = list(kwargs.pop("output_modalities", None) or MODALITIES)
        self._llm = AsyncLLM.from_engine_args(AsyncEngineArgs(model=model, **kwargs))
        self._running: dict[str, str] = {}  # internal id → the caller's
        self.asked: list[dict[str, Any]] = []

    @property
    def num_stages(self) -> int:
        return len(MODALITIES)

    @property
    def vllm_config(self) -> Any:
        return self._llm.vllm_config

    @property
    def model_config(self) -> Any:
        return self._llm.vllm_config.model_config

    @property
    def renderer(self) -> Any:
        return self._llm.renderer

    @property
    def errored(self) -> bool:
        return bool(self._llm.errored)

    async def check_health(self) -> None:
        await self._llm.check_health()

    async def generate(
        self,
        prompt: Any,
        sampling_params: Any = None,
        request_id: str = "",
        *,
        prompt_text: str | None = None,
        lora_request: Any = None,
        tokenization_kwargs: dict[str, Any] | None = None,
        sampling_params_list: Sequence[Any] | None = None,
        output_modalities: list[str] | None = None,
        trace_headers: Mapping[str, str] | None = None,
        priority: int = 0,
        data_parallel_rank: int | None = None,
        session_id: str | None = None,
        reasoning_ended: bool | None = None,
        reasoning_parser_kwargs: dict[str, Any] | None = None,
        arrival_time: float | None = None,
    ) -> AsyncGenerator[Any, None]:
        if sampling_params_list is not None and len(sampling_params_list) != self.num_stages:
            raise ValueError(f"Expected {self.num_stages} sampling params, got {len(sampling_params_list)}")
        first = sampling_params_list[0] if sampling_params_list is not None else sampling_params
        wanted = [kind for kind in output_modalities or self.output_modalities if kind in self.output_modalities]
        self.asked.append({"request_id": request_id, "output_modalities": output_modalities})
        internal = f"{request_id}-{uuid.uuid4().hex[:8]}"
        self._running[internal] = request_id
        try:
            async with aclosing(self._llm.generate(prompt, first, internal, priority=priority)) as results:
                async for result in results:
                    if "text" in (wanted or self.output_modalities):
                        yield _flat(result, stage_id=0, kind="text")
                if "audio" in (wanted or self.output_modalities):
                    yield SimpleNamespace(stage_id=1, final_output_type="audio", outputs=[], error=None, finished=True)
        finally:
            self._running.pop(internal, None)

    async def abort(self, request_id: str | Iterable[str], *, timeout: float | None = None) -> None:
        ids = {request_id} if isinstance(request_id, str) else set(request_id)
        await self._llm.abort([internal for internal, asked in self._running.items() if asked in ids])

    def shutdown(self, timeout: float | None = None) -> None:
        if self._llm.output_handler is not None:
            self._llm.output_handler.cancel()
        self._llm.shutdown(timeout)


def _flat(result: Any, *, stage_id: int, kind: str) -> Any:
    """An OmniRequestOutput has the fields of a RequestOutput, and those of its stage beside them."""
    names = ("request_id", "prompt_token_ids", "prompt_logprobs", "outputs", "finished", "num_cached_tokens", "metrics")
    fields = {name: getattr(result, name) for name in names}
    return SimpleNamespace(**fields, kv_transfer_params=None, stage_id=stage_id, final_output_type=kind, error=None)


@contextmanager
def installed() -> Iterator[None]:
    """Have `import vllm_omni` find the stand-in."""
    module = ModuleType("vllm_omni")
    module.AsyncOmni, module.__version__ = AsyncOmni, VERSION  # type: ignore[attr-defined]
    before = sys.modules.get("vllm_omni")
    sys.modules["vllm_omni"] = module
    try:
        yield
    finally:
        if before is None:
            del sys.modules["vllm_omni"]
        else:
            sys.modules["vllm_omni"] = before
